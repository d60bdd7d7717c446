/* What loops over tables share: the layout of a sum, and its minimum over one axis. */

#ifndef AUTOPAR_MIN_PLUS_H
#define AUTOPAR_MIN_PLUS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* An array of numpy has at most 64 axes. */
#define MAX_AXES 64
#define MAX_TERMS 128

typedef struct {
    int terms, axes;
    Py_ssize_t size;                         /* of k */
    Py_ssize_t shape[MAX_AXES];              /* of the output */
    Py_ssize_t by_k[MAX_TERMS];
    Py_ssize_t by_axis[MAX_AXES][MAX_TERMS]; /* strides in entries, 0 where a term lacks the axis */
} Plan;

/* Open a float64 array; -1 with an error where it is none. */
int autopar_open_table(PyObject *array, Py_buffer *view, int flags);

/* Join neighbouring axes that every term passes in one stride, so that rows are long. */
void autopar_join_axes(Plan *plan);

/* Write the minimum over k of the terms' sum, in the order of the output. */
void autopar_minimise_plan(const Plan *plan, double *out, const double *const *starts);

#endif
