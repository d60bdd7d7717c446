/* Coordinate descent, compiled: what descent.py does, number by number.

   A program of int64 has one record for each variable that has a choice:

       its number, its own table, its table of bytes (-1: none); number of neighbours
       for each neighbour: its number, the table of the pair, and the variable's axis there
*/

#include "min_plus.h"
#include "arrays.h"
#include <math.h>

typedef struct {
    Py_buffer *tables;
    Py_ssize_t count, variables;
    Py_buffer program, choices;
    double *local;
} Descent;

static int open_all(Descent *d, PyObject *tables, PyObject *program, PyObject *choices)
{
    memset(d, 0, sizeof(*d));
    if (open_numbers(program, &d->program, PyBUF_SIMPLE) ||
        open_numbers(choices, &d->choices, PyBUF_WRITABLE))
        return -1;
    d->variables = d->choices.len / (Py_ssize_t)sizeof(int64_t);
    const Py_ssize_t count = PyList_Size(tables);
    d->tables = PyMem_Malloc((count ? count : 1) * sizeof(Py_buffer));
    if (!d->tables) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t largest = 1;
    for (; d->count < count; d->count++) {
        Py_buffer *table = &d->tables[d->count];
        if (autopar_open_table(PyList_GetItem(tables, d->count), table, PyBUF_STRIDES))
            return -1;
        if (table->ndim == 1 && table->shape[0] > largest)
            largest = table->shape[0];
    }
    d->local = PyMem_Malloc(largest * sizeof(double));
    if (d->local)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void close_all(Descent *d)
{
    PyMem_Free(d->local);
    while (d->count)
        PyBuffer_Release(&d->tables[--d->count]);
    PyMem_Free(d->tables);
    if (d->choices.obj)
        PyBuffer_Release(&d->choices);
    if (d->program.obj)
        PyBuffer_Release(&d->program);
}

/* A table of `rank` axes; NULL where there is none such. */
static const Py_buffer *table_of(const Descent *d, int64_t number, int rank)
{
    const int there = number >= 0 && number < d->count && d->tables[number].ndim == rank;
    return there ? &d->tables[number] : NULL;
}

static Py_ssize_t stride_of(const Py_buffer *table, int64_t axis)
{
    return table->strides[axis] / (Py_ssize_t)sizeof(double);
}

/* Whether the record at `at` names variables, choices and tables that are there. */
static int is_whole(const Descent *d, const int64_t *at, const int64_t *end)
{
    if (end - at < 4 || at[3] < 0 || at[3] > (end - at - 4) / 3)
        return 0;
    const int64_t *choices = d->choices.buf;
    const Py_buffer *own = table_of(d, at[1], 1);
    const Py_buffer *weight = at[2] < 0 ? own : table_of(d, at[2], 1);
    if (!own || !weight || weight->shape[0] != own->shape[0] || at[0] < 0 ||
        at[0] >= d->variables || choices[at[0]] < 0 || choices[at[0]] >= own->shape[0])
        return 0;
    for (const int64_t *pair = at + 4; pair < at + 4 + 3 * at[3]; pair += 3) {
        const Py_buffer *table = table_of(d, pair[1], 2);
        if (!table || pair[0] < 0 || pair[0] >= d->variables || pair[2] < 0 || pair[2] > 1 ||
            table->shape[pair[2]] != own->shape[0])
            return 0;
    }
    return 1;
}

/* Let a variable take its best choice; whether it is another one, -1 where a neighbour has none. */
static int moved(Descent *d, const int64_t *at, double price, double *room)
{
    int64_t *choices = d->choices.buf;
    const Py_buffer *own = table_of(d, at[1], 1);
    const Py_ssize_t size = own->shape[0], by = stride_of(own, 0);
    const double *table = own->buf;
    double *local = d->local;
    for (Py_ssize_t k = 0; k < size; k++)
        local[k] = table[k * by];
    for (const int64_t *pair = at + 4; pair < at + 4 + 3 * at[3]; pair += 3) {
        const Py_buffer *both = table_of(d, pair[1], 2);
        const Py_ssize_t stride = stride_of(both, pair[2]);
        const int64_t chosen = choices[pair[0]];
        if (chosen < 0 || chosen >= both->shape[1 - pair[2]])
            return -1;
        const double *row = (const double *)both->buf + chosen * stride_of(both, 1 - pair[2]);
        for (Py_ssize_t k = 0; k < size; k++)
            local[k] += row[k * stride];
    }
    const int64_t old = choices[at[0]];
    const Py_buffer *weight = table_of(d, at[2], 1);
    const double *memory = weight ? weight->buf : NULL;
    const Py_ssize_t weighed = weight ? stride_of(weight, 0) : 0;
    if (memory) {
        for (Py_ssize_t k = 0; k < size; k++) {
            const double more = memory[k * weighed] - memory[old * weighed];
            local[k] += price * memory[k * weighed];
            /* Choices over the limit may stay so: only moves that take more bytes are barred. */
            if (more > 0 && more > *room)
                local[k] = INFINITY;
        }
    }
    Py_ssize_t best = 0;
    for (Py_ssize_t k = 1; k < size; k++)
        if (local[k] < local[best])
            best = k;
    /* Only a strictly better choice, so that equal ones cannot take turns for ever. */
    if (!(local[best] < local[old]))
        return 0;
    if (memory)
        *room -= memory[best * weighed] - memory[old * weighed];
    choices[at[0]] = best;
    return 1;
}

PyObject *autopar_descend(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tables, *program, *choices;
    double price, room;
    int sweeps;
    if (!PyArg_ParseTuple(args, "O!OOddi", &PyList_Type, &tables, &program, &choices, &price,
                          &room, &sweeps))
        return NULL;
    Descent d;
    int failed = open_all(&d, tables, program, choices);
    const int64_t *begin = d.program.buf;
    const int64_t *end = begin + d.program.len / (Py_ssize_t)sizeof(int64_t);
    const int64_t *checked = begin;
    while (!failed && checked < end) {
        if (is_whole(&d, checked, end))
            checked += 4 + 3 * checked[3];
        else
            failed = refuse("a record names a variable, a choice or a table that is not there");
    }
    for (int changed = 1; !failed && changed && sweeps > 0; sweeps--) {
        changed = 0;
        Py_BEGIN_ALLOW_THREADS
        for (const int64_t *at = begin; at < end && changed >= 0; at += 4 + 3 * at[3]) {
            const int moves = moved(&d, at, price, &room);
            changed = moves < 0 ? -1 : changed | moves;
        }
        Py_END_ALLOW_THREADS
        /* Long sweeps can be interrupted. */
        failed = changed < 0 ? refuse("a neighbour has no such choice") : PyErr_CheckSignals();
    }
    close_all(&d);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
