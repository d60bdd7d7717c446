/* The arrays of `array.array` that loops read and write in place. */

#ifndef AUTOPAR_ARRAYS_H
#define AUTOPAR_ARRAYS_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

static inline int refuse(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

/* Open an array of a type; -1 with an error where it is another. `formats`: those of all `of` it. */
static inline int open_array(PyObject *array, Py_buffer *view, char format, const char *of,
                             const char *formats)
{
    if (PyObject_GetBuffer(array, view, PyBUF_WRITABLE | PyBUF_FORMAT))
        return -1;
    if (view->format[0] == format && view->format[1] == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "%s has arrays of the types %s", of, formats);
    return -1;
}

/* Open an array of int64, of numpy or of `array.array`; -1 with an error where it is another. */
static inline int open_numbers(PyObject *array, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(array, view, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
        return -1;
    if (view->itemsize == sizeof(int64_t) && strchr("lq", view->format[0]) && view->ndim <= 1)
        return 0;
    PyBuffer_Release(view);
    view->obj = NULL;
    return refuse("programs and choices are arrays of int64");
}

#endif
