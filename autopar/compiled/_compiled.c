/* The compiled loops of the package, one file each. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *autopar_minimise(PyObject *module, PyObject *args);
PyObject *autopar_eliminate(PyObject *module, PyObject *args);
PyObject *autopar_assign(PyObject *module, PyObject *args);

static PyMethodDef methods[] = {
    {"minimise", autopar_minimise, METH_VARARGS,
     "minimise(out, terms): write the minimum over axis 0 of the terms' sum to `out`."},
    {"eliminate", autopar_eliminate, METH_VARARGS,
     "eliminate(tables, program, leaves, wanted): write the wanted joins' tables behind the leaves'."},
    {"assign", autopar_assign, METH_VARARGS,
     "assign(tables, program, leaves, steps, choices): write the choices that attain the optimum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_compiled", "The compiled loops.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModule_Create(&definition); }
