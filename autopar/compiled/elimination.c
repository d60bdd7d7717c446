/* The elimination of variables, compiled: all joins of a graph, and the choices that attain them.

   A program of int64 has one record for each join:

       length of the record, size of label 0, rank, sizes of labels 1, 2, ...; number of inputs
       for each input: its table, its rank, the label of each of its axes
       for each input in the order of merging: its number, and the term to which it is added (-1: it
       begins a term of its own)

   The tables of the leaves come first, then one for each join. The additions are those of
   in_numpy.py, in the same order.
*/

#include "min_plus.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int refuse(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

/* Open an array of int64, of numpy or of `array.array`; -1 with an error where it is another. */
static int open_numbers(PyObject *array, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(array, view, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
        return -1;
    if (view->itemsize == sizeof(int64_t) && strchr("lq", view->format[0]) && view->ndim <= 1)
        return 0;
    PyBuffer_Release(view);
    view->obj = NULL;
    return refuse("programs and choices are arrays of int64");
}

#define MAX_LABELS MAX_AXES
/* Additions behind which an interrupt is looked for. */
#define OFTEN 1000000

typedef struct {
    const int64_t *table; /* table, rank, labels */
    int merged;           /* the term that it is part of */
} Input;

typedef struct {
    Py_ssize_t size;
    int rank, inputs;
    const int64_t *shape;
    Input input[MAX_TERMS];
    const int64_t *merging;
} Record;

/* Read the record at `at`, of which all is checked that later steps rely on. */
static int read_record(Record *record, const int64_t *at, const int64_t *end)
{
    if (end - at < 4 || at[0] > end - at || at[2] < 0 || at[2] >= MAX_LABELS || at[0] < 4 + at[2])
        return refuse("a record of the program is cut off");
    end = at + at[0];
    record->size = (Py_ssize_t)at[1];
    record->rank = (int)at[2];
    record->shape = at + 3;
    at += 3 + record->rank;
    if (record->size < 1 || *at < 1 || *at > MAX_TERMS)
        return refuse("a sum has 1 to 128 terms");
    record->inputs = (int)*at++;
    for (int i = 0; i < record->inputs; i++) {
        if (end - at < 2 || at[1] < 1 || at[1] > record->rank + 1 || end - at < 2 + at[1])
            return refuse("a record of the program is cut off");
        record->input[i].table = at;
        int whole = 0;
        for (int axis = 0; axis < at[1]; axis++) {
            if (at[2 + axis] < 0 || at[2 + axis] > record->rank)
                return refuse("a label is none of the join");
            whole |= at[2 + axis] == 0;
        }
        if (!whole)
            return refuse("every table of a join has its label 0");
        at += 2 + at[1];
    }
    if (end - at != 2 * record->inputs)
        return refuse("a record of the program is cut off");
    record->merging = at;
    int terms = 0;
    for (int m = 0; m < record->inputs; m++) {
        const int64_t input = at[2 * m], host = at[2 * m + 1];
        if (input < 0 || input >= record->inputs || host < -1 || host >= terms)
            return refuse("a table is added to no term");
        record->input[input].merged = host < 0 ? terms++ : (int)host;
    }
    return 0;
}

static Py_ssize_t size_of(const Record *record, int64_t label)
{
    return label ? (Py_ssize_t)record->shape[label - 1] : record->size;
}

/* The strides in entries of each label, 0 where a table lacks it; -1 where its shape is another. */
static int strides_of(const Record *record, const Input *input, const Py_buffer *views,
                      Py_ssize_t tables, Py_ssize_t *strides)
{
    const int64_t number = input->table[0], rank = input->table[1];
    memset(strides, 0, (record->rank + 1) * sizeof(*strides));
    if (number < 0 || number >= tables || views[number].ndim != rank)
        return refuse("a join reads a table that is not there");
    for (int axis = 0; axis < rank; axis++) {
        const int64_t label = input->table[2 + axis];
        if (views[number].shape[axis] != size_of(record, label))
            return refuse("the terms' shapes do not fit the output's");
        if (views[number].shape[axis] > 1)
            strides[label] = views[number].strides[axis] / (Py_ssize_t)sizeof(double);
    }
    return 0;
}

static int has(const Input *input, int64_t label)
{
    for (int axis = 0; axis < input->table[1]; axis++)
        if (input->table[2 + axis] == label)
            return 1;
    return 0;
}

/* Write a table into a block over `labels`, or add it there. */
static void lay_into(double *block, const Py_ssize_t *sizes, const double *table,
                     const Py_ssize_t *strides, int labels, int add)
{
    if (labels > 1) {
        Py_ssize_t inner = 1;
        for (int axis = 1; axis < labels; axis++)
            inner *= sizes[axis];
        for (Py_ssize_t i = 0; i < sizes[0]; i++)
            lay_into(block + i * inner, sizes + 1, table + i * strides[0], strides + 1, labels - 1,
                     add);
        return;
    }
    const Py_ssize_t stride = strides[0];
    if (add)
        for (Py_ssize_t i = 0; i < sizes[0]; i++)
            block[i] += table[i * stride];
    else
        for (Py_ssize_t i = 0; i < sizes[0]; i++)
            block[i] = table[i * stride];
}

/* The sums of one join as terms of a plan; `scratch` receives what is not read where it lies. */
typedef struct {
    Plan plan;
    const double *starts[MAX_TERMS];
    double *scratch[MAX_TERMS];
    int scratches;
} Sums;

static void release(Sums *sums)
{
    while (sums->scratches)
        free(sums->scratch[--sums->scratches]);
}

/* Whether rows of the term are read in one piece. */
static int is_laid(const Record *record, const Py_ssize_t *strides)
{
    Py_ssize_t behind = 1;
    for (int label = record->rank; label >= 0; label--) {
        if (!strides[label])
            continue;
        if (strides[label] != behind)
            return 0;
        behind *= size_of(record, label);
    }
    return 1;
}

static int merge(Sums *sums, const Record *record, const Py_buffer *views, Py_ssize_t tables)
{
    Py_ssize_t by_label[MAX_TERMS][MAX_LABELS];
    int guests[MAX_TERMS] = {0};
    const Input *hosts[MAX_TERMS];
    for (int m = 0; m < record->inputs; m++)
        if (record->merging[2 * m + 1] >= 0)
            guests[record->merging[2 * m + 1]]++;
    sums->plan.terms = 0;
    for (int m = 0; m < record->inputs; m++) {
        const Input *input = &record->input[record->merging[2 * m]];
        const int begins = record->merging[2 * m + 1] < 0;
        Py_ssize_t strides[MAX_LABELS];
        if (strides_of(record, input, views, tables, strides))
            return -1;
        const double *data = views[input->table[0]].buf;
        const int term = input->merged;
        if (begins) {
            sums->plan.terms++;
            hosts[term] = input;
            memcpy(by_label[term], strides, (record->rank + 1) * sizeof(*strides));
            sums->starts[term] = data;
            if (!guests[term] && is_laid(record, strides))
                continue;
        }
        /* The labels of the term, in ascending order, with its sizes and these strides. */
        Py_ssize_t sizes[MAX_LABELS], here[MAX_LABELS], own[MAX_LABELS];
        int labels = 0;
        Py_ssize_t entries = 1;
        for (int label = 0; label <= record->rank; label++)
            if (has(hosts[term], label)) {
                own[labels] = label;
                sizes[labels] = size_of(record, label);
                here[labels] = strides[label];
                entries *= sizes[labels++];
            }
        if (begins) {
            double *block = malloc(entries * sizeof(double));
            if (!block) {
                PyErr_NoMemory();
                return -1;
            }
            sums->scratch[sums->scratches++] = block;
            sums->starts[term] = block;
            Py_ssize_t behind = 1;
            for (int axis = labels - 1; axis >= 0; axis--) {
                by_label[term][own[axis]] = sizes[axis] > 1 ? behind : 0;
                behind *= sizes[axis];
            }
        }
        lay_into((double *)sums->starts[term], sizes, data, here, labels, !begins);
    }
    Plan *plan = &sums->plan;
    plan->size = record->size;
    plan->axes = 0;
    for (int label = 0; label <= record->rank; label++) {
        const Py_ssize_t size = size_of(record, label);
        Py_ssize_t *row = label ? plan->by_axis[plan->axes] : plan->by_k;
        for (int t = 0; t < plan->terms; t++)
            row[t] = by_label[t][label];
        /* An axis of one entry is passed by the others. */
        if (label && size > 1)
            plan->shape[plan->axes++] = size;
    }
    if (!plan->axes) {
        memset(plan->by_axis[0], 0, plan->terms * sizeof(Py_ssize_t));
        plan->shape[plan->axes++] = 1;
    }
    autopar_join_axes(plan);
    return 0;
}

/* Whether an output has the shape of its join, in one piece. */
static int fits(const Record *record, const Py_buffer *out)
{
    Py_ssize_t behind = sizeof(double);
    if (out->ndim != record->rank || out->readonly)
        return 0;
    for (int axis = record->rank - 1; axis >= 0; axis--) {
        if (out->shape[axis] != record->shape[axis] || out->shape[axis] < 1)
            return 0;
        if (out->shape[axis] > 1 && out->strides[axis] != behind)
            return 0;
        behind *= out->shape[axis];
    }
    return 1;
}

typedef struct {
    Py_buffer *tables;
    Py_ssize_t count;
    Py_buffer program;
} Opened;

static void close_all(Opened *opened)
{
    while (opened->count)
        PyBuffer_Release(&opened->tables[--opened->count]);
    PyMem_Free(opened->tables);
    if (opened->program.obj)
        PyBuffer_Release(&opened->program);
}

static int open_all(Opened *opened, PyObject *tables, PyObject *program)
{
    memset(opened, 0, sizeof(*opened));
    if (open_numbers(program, &opened->program, PyBUF_SIMPLE))
        return -1;
    const Py_ssize_t count = PyList_Size(tables);
    opened->tables = PyMem_Malloc((count ? count : 1) * sizeof(Py_buffer));
    if (!opened->tables) {
        PyErr_NoMemory();
        return -1;
    }
    for (; opened->count < count; opened->count++)
        if (autopar_open_table(PyList_GetItem(tables, opened->count),
                               &opened->tables[opened->count], PyBUF_STRIDES))
            return -1;
    return 0;
}

PyObject *autopar_eliminate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tables, *program;
    Py_ssize_t leaves;
    const char *wanted;
    Py_ssize_t joins;
    if (!PyArg_ParseTuple(args, "O!Ony#", &PyList_Type, &tables, &program, &leaves, &wanted, &joins))
        return NULL;
    Opened opened;
    int failed = open_all(&opened, tables, program);
    if (!failed && (leaves < 0 || leaves + joins != opened.count))
        failed = refuse("a table is needed for each leaf and each join");
    const int64_t *at = opened.program.buf;
    const int64_t *end = at + opened.program.len / (Py_ssize_t)sizeof(int64_t);
    double done = 0;
    Sums sums;
    sums.scratches = 0;
    for (Py_ssize_t join = 0; join < joins && !failed; join++, at += at[0]) {
        Record record;
        failed = read_record(&record, at, end);
        if (failed || !wanted[join])
            continue;
        Py_buffer *out = &opened.tables[leaves + join];
        if (!fits(&record, out))
            failed = refuse("the terms' shapes do not fit the output's");
        else
            failed = merge(&sums, &record, opened.tables, leaves + join);
        if (!failed) {
            Py_BEGIN_ALLOW_THREADS
            autopar_minimise_plan(&sums.plan, out->buf, sums.starts);
            Py_END_ALLOW_THREADS
            done += (double)record.size * ((double)out->len / sizeof(double));
        }
        release(&sums);
        /* A long elimination can be interrupted. */
        if (!failed && done > OFTEN) {
            done = 0;
            failed = PyErr_CheckSignals();
        }
    }
    close_all(&opened);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* The choice of label 0 of least sum, with the neighbours' `chosen` ones; -1 with an error. */
static Py_ssize_t attained(const Record *record, const Py_buffer *views, Py_ssize_t tables,
                           const int64_t *neighbours, const int64_t *choices, Py_ssize_t variables,
                           double *total)
{
    memset(total, 0, record->size * sizeof(*total));
    for (int i = 0; i < record->inputs; i++) {
        Py_ssize_t strides[MAX_LABELS];
        if (strides_of(record, &record->input[i], views, tables, strides))
            return -1;
        const double *term = views[record->input[i].table[0]].buf;
        for (int label = 1; label <= record->rank; label++) {
            const int64_t neighbour = neighbours[label - 1];
            if (neighbour < 0 || neighbour >= variables || choices[neighbour] < 0 ||
                choices[neighbour] >= record->shape[label - 1])
                return refuse("a neighbour has no such choice");
            term += choices[neighbour] * strides[label];
        }
        for (Py_ssize_t k = 0; k < record->size; k++)
            total[k] += term[k * strides[0]];
    }
    Py_ssize_t best = 0;
    for (Py_ssize_t k = 1; k < record->size; k++)
        if (total[k] < total[best])
            best = k;
    return best;
}

PyObject *autopar_assign(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tables, *program, *sequence, *target;
    Py_ssize_t leaves;
    if (!PyArg_ParseTuple(args, "O!OnOO", &PyList_Type, &tables, &program, &leaves, &sequence,
                          &target))
        return NULL;
    Opened opened;
    Py_buffer steps = {0}, choices = {0};
    const int64_t **joins = NULL;
    double *total = NULL;
    Py_ssize_t count = 0, largest = 1;
    int failed = open_all(&opened, tables, program) || open_numbers(sequence, &steps, PyBUF_SIMPLE);
    if (!failed)
        failed = open_numbers(target, &choices, PyBUF_WRITABLE);
    const int64_t *at = opened.program.buf;
    const int64_t *end = at + opened.program.len / (Py_ssize_t)sizeof(int64_t);
    if (!failed && !(joins = PyMem_Malloc((opened.count + 1) * sizeof(*joins)))) {
        PyErr_NoMemory();
        failed = -1;
    }
    for (; !failed && at < end; at += at[0]) {
        Record record;
        failed = read_record(&record, at, end);
        if (!failed && count == opened.count - leaves)
            failed = refuse("a table is needed for each leaf and each join");
        if (!failed) {
            joins[count++] = at;
            largest = record.size > largest ? record.size : largest;
        }
    }
    if (!failed && !(total = PyMem_Malloc(largest * sizeof(double)))) {
        PyErr_NoMemory();
        failed = -1;
    }
    const Py_ssize_t variables = choices.len / (Py_ssize_t)sizeof(int64_t);
    int64_t *chosen = choices.buf;
    const int64_t *step = steps.buf;
    const int64_t *last = step + steps.len / (Py_ssize_t)sizeof(int64_t);
    while (!failed && step < last) {
        Record record;
        if (last - step < 2 || step[0] < 0 || step[0] >= variables || step[1] < 0 ||
            step[1] >= count) {
            failed = refuse("a step of the program is cut off");
            break;
        }
        failed = read_record(&record, joins[step[1]], end);
        if (!failed && last - step < 2 + record.rank)
            failed = refuse("a step of the program is cut off");
        if (failed)
            break;
        const Py_ssize_t best = attained(&record, opened.tables, opened.count, step + 2, chosen,
                                         variables, total);
        failed = best < 0;
        if (!failed)
            chosen[step[0]] = best;
        step += 2 + record.rank;
    }
    PyMem_Free(joins);
    PyMem_Free(total);
    if (steps.obj)
        PyBuffer_Release(&steps);
    if (choices.obj)
        PyBuffer_Release(&choices);
    close_all(&opened);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
