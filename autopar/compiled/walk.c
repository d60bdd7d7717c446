/* The walk over the steps of a program, compiled: what in_python.py does, number by number.

   Arrays are read and written where they lie. Those of memories, moments and temporaries have room
   behind their entries; where a step may need more of it, the walk stops in front of the step.
*/

#define PY_SSIZE_T_CLEAN
#include "arrays.h"
#include <stdint.h>
#include <string.h>

enum { REDISTRIBUTION = 1, VIEW = 2, BACKWARD = 4, ONCE = 8, INPUT = 16, DIFFERENTIABLE = 32,
       REMADE = 64, HEAVY = 128 };
enum { NEW, SAME, CAST };
enum { FORWARD, KEEPING, BACK };
enum { STORED = -1, MISSING = -2, PASSING = 3, CLOSED = 8 };

/* The arrays in the order of the named tuples of in_python.py. */
enum { CODE, SIZES, CODE_AT, SIZES_AT,
       HERE, GATHERED, PREPARED, GRADIENTS, ADDED, SAVED,
       SIZE, BIRTH, DEATH, KIND, HOLDERS, KEEPER, SOURCE, MOMENTS, TEMPORARY_AT, TEMPORARY,
       COUNTS, STEPS, ARRAYS };
static const char formats[ARRAYS + 1] = "qdqqqqqqqqdqqqqqqqqdqq";
static const Py_ssize_t parts[] = {4, 6, 10};

typedef struct {
    void *at[ARRAYS];
    Py_ssize_t length[ARRAYS];
} Walk;

#define INTS(array) ((int64_t *)w->at[array])
#define DOUBLES(array) ((double *)w->at[array])
#define MADE INTS(COUNTS)[0]
#define TICKS INTS(COUNTS)[1]
#define TEMPORARIES INTS(COUNTS)[2]

static void tick(Walk *w, int64_t worker) { INTS(MOMENTS)[TICKS++] = worker; }

static int64_t new_memory(Walk *w, double size)
{
    const int64_t number = MADE++;
    DOUBLES(SIZE)[number] = size;
    INTS(BIRTH)[number] = INTS(DEATH)[number] = TICKS - 1;
    INTS(KIND)[number] = PASSING;
    INTS(HOLDERS)[number] = 0;
    INTS(KEEPER)[number] = -1;
    INTS(SOURCE)[number] = MISSING;
    return number;
}

static void read_memory(Walk *w, int64_t memory)
{
    if (memory >= 0 && INTS(KIND)[memory] < CLOSED)
        INTS(DEATH)[memory] = TICKS - 1;
}

static int64_t value(const Walk *w, int64_t place)
{
    int64_t memory = INTS(HERE)[place];
    if (memory == MISSING)
        memory = INTS(GATHERED)[place];
    return memory == MISSING ? STORED : memory;
}

static void temporary(Walk *w, double size)
{
    INTS(TEMPORARY_AT)[TEMPORARIES] = TICKS - 1;
    DOUBLES(TEMPORARY)[TEMPORARIES++] = size;
}

static void add(Walk *w, int64_t place, int64_t gradient)
{
    int64_t *holders = INTS(HOLDERS);
    INTS(ADDED)[place] = TICKS - 1;
    const int64_t before = INTS(GRADIENTS)[place];
    if (before == MISSING) {
        INTS(GRADIENTS)[place] = gradient;
        holders[gradient]++;
        return;
    }
    read_memory(w, before);
    read_memory(w, gradient);
    if (holders[before] > 1) {
        holders[before]--;
        const int64_t total = new_memory(w, DOUBLES(SIZE)[before]);
        INTS(GRADIENTS)[place] = total;
        holders[total] = 1;
    }
}

/* --- operators --- */

static void keep_memory(Walk *w, int64_t slot, int64_t memory)
{
    INTS(SAVED)[slot] = memory;
    if (memory >= 0 && INTS(KEEPER)[memory] < 0)
        INTS(KEEPER)[memory] = INTS(MOMENTS)[TICKS - 1];
}

static void compute(Walk *w, const int64_t *code, const double *sizes, int keeps)
{
    const int64_t flags = code[0], slot = code[2], inputs = code[3], outputs = code[4];
    const int64_t buffers = code[5], kept = code[6];
    const int64_t *in = code + 8, *out = in + inputs, *positions = out + outputs;
    if (flags & ONCE) {
        int64_t ready = 0;
        while (ready < outputs && INTS(PREPARED)[out[ready]] != MISSING)
            ready++;
        if (ready == outputs)
            return;
    }
    tick(w, code[1]);
    for (int64_t i = 0; i < inputs; i++)
        read_memory(w, value(w, in[i]));
    keeps = keeps && flags & BACKWARD;
    /* Inputs first: an output may be at the place of one. */
    for (int64_t k = 0; keeps && k < kept; k++)
        if (positions[k] < inputs)
            keep_memory(w, slot + k, value(w, in[positions[k]]));
    const int64_t first = inputs ? value(w, in[0]) : STORED;
    for (int64_t o = 0; o < outputs; o++) {
        const int64_t memory = flags & VIEW ? first : new_memory(w, sizes[o]);
        INTS(HERE)[out[o]] = memory;
        if (flags & REMADE && memory != first)
            INTS(SOURCE)[memory] = first;
        for (int64_t k = 0; keeps && k < kept; k++)
            if (positions[k] == inputs + o)
                keep_memory(w, slot + k, memory);
        if (flags & ONCE)
            INTS(PREPARED)[out[o]] = memory;
    }
    for (int64_t b = 0; b < buffers; b++) {
        const int64_t memory = new_memory(w, sizes[outputs + b]);
        if (keeps)
            keep_memory(w, slot + kept + b, memory);
    }
}

static void compute_back(Walk *w, const int64_t *code, const double *sizes)
{
    const int64_t slot = code[2], inputs = code[3], outputs = code[4];
    const int64_t buffers = code[5], kept = code[6], flows = code[7];
    const int64_t *out = code + 8 + inputs, *flow = out + outputs + kept;
    tick(w, code[1]);
    int64_t arrived = MISSING;
    for (int64_t o = 0; o < outputs; o++) {
        const int64_t gradient = INTS(GRADIENTS)[out[o]];
        if (gradient == MISSING)
            continue;
        INTS(GRADIENTS)[out[o]] = MISSING;
        read_memory(w, gradient);
        INTS(HOLDERS)[gradient]--;
        if (arrived == MISSING)
            arrived = gradient;
    }
    for (int64_t k = 0; k < kept + buffers; k++) {
        int64_t memory = INTS(SAVED)[slot + k];
        for (; memory >= 0 && INTS(SOURCE)[memory] != MISSING; memory = INTS(SOURCE)[memory])
            temporary(w, DOUBLES(SIZE)[memory]);
        read_memory(w, memory);
    }
    if (arrived == MISSING)
        return;
    sizes += outputs + buffers;
    if (code[0] & HEAVY)
        temporary(w, sizes[0]);
    for (int64_t f = 0; f < flows; f++) {
        if (flow[2 * f + 1] == CAST)
            temporary(w, sizes[2 + 2 * f]);
        add(w, flow[2 * f],
            flow[2 * f + 1] == SAME ? arrived : new_memory(w, sizes[1 + 2 * f]));
    }
}

/* --- redistributions --- */

static void redistribute(Walk *w, const int64_t *code, const double *sizes)
{
    tick(w, code[1]);
    if (code[0] & INPUT) {
        INTS(HERE)[code[3]] = STORED;
        return;
    }
    int64_t memory = value(w, code[2]);
    for (int64_t n = 0; n < code[4]; n++) {
        const int64_t makes = code[5 + 2 * n];
        read_memory(w, memory);
        if (makes) {
            temporary(w, sizes[4 * n]);
            const int64_t made = new_memory(w, sizes[4 * n + 1]);
            if (makes == 2)
                INTS(SOURCE)[made] = memory;
            memory = made;
        }
    }
    INTS(HERE)[code[3]] = memory;
}

static void redistribute_back(Walk *w, const int64_t *code, const double *sizes)
{
    int64_t gradient = INTS(GRADIENTS)[code[3]];
    INTS(GRADIENTS)[code[3]] = MISSING;
    if (gradient == MISSING || !(code[0] & DIFFERENTIABLE))
        return;
    tick(w, code[1]);
    INTS(HOLDERS)[gradient]--;
    for (int64_t n = code[4] - 1; n >= 0; n--) {
        read_memory(w, gradient);
        if (code[6 + 2 * n]) {
            temporary(w, sizes[4 * n + 2]);
            gradient = new_memory(w, sizes[4 * n + 3]);
        }
    }
    add(w, code[2], gradient);
}

/* --- the walk --- */

/* Whether there is room for all that a step may make. */
static int has_room(const Walk *w, const int64_t *code, int64_t way)
{
    int64_t memories, temporaries;
    if (code[0] & REDISTRIBUTION) {
        memories = temporaries = code[4] + 1;
    } else {
        memories = code[4] + code[5] + 2 * code[7];
        temporaries = 1 + code[7];
        for (int64_t k = 0; way == BACK && k < code[5] + code[6]; k++)
            for (int64_t m = INTS(SAVED)[code[2] + k]; m >= 0 && INTS(SOURCE)[m] != MISSING;
                 m = INTS(SOURCE)[m])
                temporaries++;
    }
    return MADE + memories <= w->length[SIZE] && TICKS < w->length[MOMENTS]
        && TEMPORARIES + temporaries <= w->length[TEMPORARY];
}

static Py_ssize_t walk(Walk *w, Py_ssize_t start, int64_t way)
{
    for (Py_ssize_t n = start; n < w->length[STEPS]; n++) {
        const int64_t step = INTS(STEPS)[n];
        if (step < 0 || step >= w->length[CODE_AT])
            return -1;
        const int64_t *code = INTS(CODE) + INTS(CODE_AT)[step];
        const double *sizes = DOUBLES(SIZES) + INTS(SIZES_AT)[step];
        if (!has_room(w, code, way))
            return n;
        if (code[0] & REDISTRIBUTION) {
            if (way == BACK)
                redistribute_back(w, code, sizes);
            else
                redistribute(w, code, sizes);
        } else if (way != BACK)
            compute(w, code, sizes, way == KEEPING);
        else if (code[0] & BACKWARD)
            compute_back(w, code, sizes);
    }
    return w->length[STEPS];
}

PyObject *autopar_walk(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tuples[3], *last[2];
    Py_ssize_t start;
    long long way;
    if (!PyArg_ParseTuple(args, "O!O!O!OOnL", &PyTuple_Type, &tuples[0], &PyTuple_Type, &tuples[1],
                          &PyTuple_Type, &tuples[2], &last[0], &last[1], &start, &way))
        return NULL;
    Py_buffer views[ARRAYS];
    Walk w;
    int opened = 0, failed = 0;
    for (int t = 0; t < 4 && !failed; t++) {
        const Py_ssize_t count = t < 3 ? parts[t] : 2;
        if (t < 3 && PyTuple_Size(tuples[t]) != count) {
            PyErr_SetString(PyExc_ValueError, "a walk has 4, 6 and 10 arrays");
            failed = 1;
        }
        for (Py_ssize_t i = 0; i < count && !failed; i++) {
            PyObject *array = t < 3 ? PyTuple_GetItem(tuples[t], i) : last[i];
            failed = open_array(array, &views[opened], formats[opened], "a walk", formats);
            if (!failed) {
                w.at[opened] = views[opened].buf;
                w.length[opened] = views[opened].len / 8;
                opened++;
            }
        }
    }
    Py_ssize_t done = -1;
    if (!failed) {
        done = walk(&w, start, way);
        if (done < 0)
            PyErr_SetString(PyExc_ValueError, "a step is not in the script");
    }
    while (opened)
        PyBuffer_Release(&views[--opened]);
    return done < 0 ? NULL : PyLong_FromSsize_t(done);
}
