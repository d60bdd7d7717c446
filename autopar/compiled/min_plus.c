/* The min-plus kernel, compiled: the same additions in the same order as in in_numpy.py.

       out[a, b, ...] = min over k of t_0[k, a, b, ...] + t_1[k, a, b, ...] + ...

   Terms are read where they lie: an axis that a term lacks has a stride of zero. Sums are never
   stored; a row of the output stays in the first-level cache while k runs. It uses the stable ABI
   of Python 3.11 and the buffer protocol alone, so that one wheel serves all versions.
*/

#include "min_plus.h"
#include <string.h>

/* Entries of a row that are minimised at once: with two terms 12 KiB, a part of the first cache. */
#define ROW 512

/* Wider vectors where the processor has them; additions and minima are the same in each. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

static inline double lesser(double a, double b) { return b < a ? b : a; }

/* out[j] = min over k of a[k] + b[k, j] */
VECTORS static void fixed_and_row(double *restrict out, const double *restrict a, Py_ssize_t a_k,
                                  const double *restrict b, Py_ssize_t b_k, Py_ssize_t size,
                                  Py_ssize_t n)
{
    for (Py_ssize_t j = 0; j < n; j++)
        out[j] = a[0] + b[j];
    Py_ssize_t k = 1;
    for (; k + 3 < size; k += 4) {
        const double a0 = a[k * a_k], a1 = a[(k + 1) * a_k];
        const double a2 = a[(k + 2) * a_k], a3 = a[(k + 3) * a_k];
        const double *b0 = b + k * b_k, *b1 = b0 + b_k, *b2 = b1 + b_k, *b3 = b2 + b_k;
        for (Py_ssize_t j = 0; j < n; j++) {
            const double low = lesser(a0 + b0[j], a1 + b1[j]);
            const double high = lesser(a2 + b2[j], a3 + b3[j]);
            out[j] = lesser(out[j], lesser(low, high));
        }
    }
    for (; k < size; k++)
        for (Py_ssize_t j = 0; j < n; j++)
            out[j] = lesser(out[j], a[k * a_k] + b[k * b_k + j]);
}

/* out[j] = min over k of a[k, j] + b[k, j] */
VECTORS static void two_rows(double *restrict out, const double *restrict a, Py_ssize_t a_k,
                             const double *restrict b, Py_ssize_t b_k, Py_ssize_t size,
                             Py_ssize_t n)
{
    for (Py_ssize_t j = 0; j < n; j++)
        out[j] = a[j] + b[j];
    for (Py_ssize_t k = 1; k < size; k++)
        for (Py_ssize_t j = 0; j < n; j++)
            out[j] = lesser(out[j], a[k * a_k + j] + b[k * b_k + j]);
}

/* out[j] = min over k of (s[k] + a[k, j]) + b[k, j] */
VECTORS static void fixed_and_two_rows(double *restrict out, const double *restrict s,
                                       const double *restrict a, Py_ssize_t a_k,
                                       const double *restrict b, Py_ssize_t b_k, Py_ssize_t size,
                                       Py_ssize_t n)
{
    for (Py_ssize_t j = 0; j < n; j++)
        out[j] = (s[0] + a[j]) + b[j];
    for (Py_ssize_t k = 1; k < size; k++)
        for (Py_ssize_t j = 0; j < n; j++)
            out[j] = lesser(out[j], (s[k] + a[k * a_k + j]) + b[k * b_k + j]);
}

/* out[j] = min over k of the sum of all terms */
VECTORS static void many_rows(double *restrict out, const double *const *at, const Py_ssize_t *by_k,
                              const Py_ssize_t *by_j, int terms, Py_ssize_t size, Py_ssize_t n)
{
    double sum[ROW];
    for (Py_ssize_t k = 0; k < size; k++) {
        const double *first = at[0] + k * by_k[0];
        for (Py_ssize_t j = 0; j < n; j++)
            sum[j] = first[j * by_j[0]];
        for (int t = 1; t < terms; t++) {
            const double *term = at[t] + k * by_k[t];
            if (by_j[t])
                for (Py_ssize_t j = 0; j < n; j++)
                    sum[j] += term[j];
            else
                for (Py_ssize_t j = 0; j < n; j++)
                    sum[j] += *term;
        }
        for (Py_ssize_t j = 0; j < n; j++)
            out[j] = k ? lesser(out[j], sum[j]) : sum[j];
    }
}

/* sums[k] = the sum of the first terms, none of which has the axis of the row */
static void sum_fixed(double *sums, const Plan *plan, const double *const *at, int terms)
{
    for (Py_ssize_t k = 0; k < plan->size; k++)
        sums[k] = at[0][k * plan->by_k[0]];
    for (int t = 1; t < terms; t++)
        for (Py_ssize_t k = 0; k < plan->size; k++)
            sums[k] += at[t][k * plan->by_k[t]];
}

static void row(const Plan *plan, double *out, const double *const *at, Py_ssize_t n)
{
    const Py_ssize_t *by_j = plan->by_axis[plan->axes - 1];
    const Py_ssize_t *by_k = plan->by_k;
    const Py_ssize_t size = plan->size;
    double sums[ROW];
    int fixed = 0;
    while (fixed < plan->terms && !by_j[fixed])
        fixed++;
    /* A later term without the row's axis has to be added in its turn. */
    int rows = 0;
    while (fixed + rows < plan->terms && by_j[fixed + rows])
        rows++;
    const double *const *moving = at + fixed;
    const Py_ssize_t *moving_k = by_k + fixed;
    if (fixed + rows < plan->terms || size > ROW || rows < 1 || rows > 2 || (!fixed && rows < 2)) {
        many_rows(out, at, by_k, by_j, plan->terms, size, n);
        return;
    }
    if (fixed)
        sum_fixed(sums, plan, at, fixed);
    if (!fixed)
        two_rows(out, at[0], by_k[0], at[1], by_k[1], size, n);
    else if (rows == 1)
        fixed_and_row(out, sums, 1, moving[0], moving_k[0], size, n);
    else
        fixed_and_two_rows(out, sums, moving[0], moving_k[0], moving[1], moving_k[1], size, n);
}

void autopar_minimise_plan(const Plan *plan, double *out, const double *const *starts)
{
    const int last = plan->axes - 1;
    const Py_ssize_t length = plan->shape[last];
    Py_ssize_t index[MAX_AXES] = {0};
    const double *at[MAX_TERMS];
    memcpy(at, starts, plan->terms * sizeof(*at));
    for (;;) {
        for (Py_ssize_t j = 0; j < length; j += ROW) {
            const double *here[MAX_TERMS];
            for (int t = 0; t < plan->terms; t++)
                here[t] = at[t] + j * plan->by_axis[last][t];
            row(plan, out + j, here, length - j < ROW ? length - j : ROW);
        }
        out += length;
        int axis = last - 1;
        for (; axis >= 0; axis--) {
            for (int t = 0; t < plan->terms; t++)
                at[t] += plan->by_axis[axis][t];
            if (++index[axis] < plan->shape[axis])
                break;
            for (int t = 0; t < plan->terms; t++)
                at[t] -= plan->shape[axis] * plan->by_axis[axis][t];
            index[axis] = 0;
        }
        if (axis < 0)
            return;
    }
}

void autopar_join_axes(Plan *plan)
{
    int axis = 0;
    for (int next = 1; next < plan->axes; next++) {
        int joined = 1;
        for (int t = 0; t < plan->terms; t++)
            joined &= plan->by_axis[axis][t] == plan->by_axis[next][t] * plan->shape[next];
        if (joined)
            plan->shape[axis] *= plan->shape[next];
        else
            plan->shape[++axis] = plan->shape[next];
        memcpy(plan->by_axis[axis], plan->by_axis[next], plan->terms * sizeof(Py_ssize_t));
    }
    plan->axes = axis + 1;
}

int autopar_open_table(PyObject *array, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(array, view, flags | PyBUF_STRIDES | PyBUF_FORMAT))
        return -1;
    if (strcmp(view->format, "d") == 0 && view->ndim <= MAX_AXES)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "tables are float64 arrays of at most 64 axes");
    return -1;
}

/* Fill in the sizes and strides; -1 with an error where shapes do not fit. */
static int lay(Plan *plan, const Py_buffer *out, const Py_buffer *terms)
{
    plan->axes = 0;
    for (int t = 0; t < plan->terms; t++) {
        if (terms[t].ndim != out->ndim + 1 || terms[t].shape[0] != terms[0].shape[0])
            goto unfit;
        plan->by_k[t] = terms[t].strides[0] / (Py_ssize_t)sizeof(double);
    }
    plan->size = terms[0].shape[0];
    if (plan->size < 1)
        goto unfit;
    for (int axis = 0; axis < out->ndim; axis++) {
        const Py_ssize_t size = out->shape[axis];
        if (size < 1)
            goto unfit;
        for (int t = 0; t < plan->terms; t++) {
            const Py_ssize_t own = terms[t].shape[axis + 1];
            if (own != 1 && own != size)
                goto unfit;
            const Py_ssize_t stride = terms[t].strides[axis + 1] / (Py_ssize_t)sizeof(double);
            plan->by_axis[plan->axes][t] = own == 1 ? 0 : stride;
        }
        /* An axis of one entry is passed by the others. */
        if (size > 1)
            plan->shape[plan->axes++] = size;
    }
    if (!plan->axes) {
        memset(plan->by_axis[0], 0, plan->terms * sizeof(Py_ssize_t));
        plan->shape[plan->axes++] = 1;
    }
    autopar_join_axes(plan);
    for (int t = 0; t < plan->terms; t++)
        if (plan->by_axis[plan->axes - 1][t] & ~(Py_ssize_t)1)
            goto unfit;
    return 0;
unfit:
    PyErr_SetString(PyExc_ValueError, "the terms' shapes do not fit the output's");
    return -1;
}

PyObject *autopar_minimise(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *target, *sequence;
    if (!PyArg_ParseTuple(args, "OO!", &target, &PyTuple_Type, &sequence))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(sequence);
    if (count < 1 || count > MAX_TERMS) {
        PyErr_SetString(PyExc_ValueError, "a sum has 1 to 128 terms");
        return NULL;
    }
    Py_buffer out, views[MAX_TERMS];
    Plan plan;
    plan.terms = (int)count;
    const double *starts[MAX_TERMS];
    int opened = 0;
    int failed = autopar_open_table(target, &out, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    if (failed)
        return NULL;
    for (; opened < count && !failed; opened += !failed)
        failed = autopar_open_table(PyTuple_GetItem(sequence, opened), &views[opened], 0);
    if (!failed)
        failed = lay(&plan, &out, views);
    if (!failed) {
        for (int t = 0; t < count; t++)
            starts[t] = views[t].buf;
        Py_BEGIN_ALLOW_THREADS
        autopar_minimise_plan(&plan, out.buf, starts);
        Py_END_ALLOW_THREADS
    }
    while (opened)
        PyBuffer_Release(&views[--opened]);
    PyBuffer_Release(&out);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
