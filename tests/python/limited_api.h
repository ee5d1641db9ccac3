// What the limited API of Python 3.12 adds, for the headers of an earlier Python: tests/python/test_stable_abi.py
// compiles the extension's sources for 3.12 with whatever headers are here.
#include <Python.h>
#if PY_VERSION_HEX < 0x030C0000
extern "C" {
PyObject* PyErr_GetRaisedException(void);
void PyErr_SetRaisedException(PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
PyObject* PyObject_VectorcallMethod(PyObject*, PyObject* const*, size_t, PyObject*);
PyObject* PyVectorcall_Call(PyObject*, PyObject*, PyObject*);
Py_ssize_t PyVectorcall_NARGS(size_t);
PyObject* PyType_FromMetaclass(PyTypeObject*, PyObject*, PyType_Spec*, PyObject*);
void* PyObject_GetTypeData(PyObject*, PyTypeObject*);
Py_ssize_t PyType_GetTypeDataSize(PyTypeObject*);
}
#endif
