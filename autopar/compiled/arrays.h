/* The arrays of `array.array` that loops read and write in place. */

#ifndef AUTOPAR_ARRAYS_H
#define AUTOPAR_ARRAYS_H

#include <Python.h>

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

#endif
