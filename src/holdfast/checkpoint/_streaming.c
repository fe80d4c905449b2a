// SPDX-License-Identifier: Apache-2.0
// Copies memory past the caches.
//
// A checkpoint is gigabytes that nobody reads soon. An ordinary copy first reads the lines that it
// is about to overwrite, and throws what the training needs out of the caches. Streaming stores do
// neither. The C library would use them by itself for large copies, but what it takes for large
// depends on the cache that a virtual machine pretends to have.
//
// SSE2 is all it takes, and every x86-64 has it. With AVX2 it was not faster: memory is the limit.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE 64
#define AHEAD 1024  // How far before its use a line is asked for.

static void copy_past_caches(char *target, const char *source, size_t length)
{
    size_t head = (size_t)(-(uintptr_t)target) % LINE;
    if (head > length) {
        head = length;
    }
    memcpy(target, source, head);
    target += head;
    source += head;
    length -= head;
    for (; length >= LINE; target += LINE, source += LINE, length -= LINE) {
        // Never faults, so it may look past the end. NTA: nor need the source stay in the caches.
        _mm_prefetch((const char *)((uintptr_t)source + AHEAD), _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
    memcpy(target, source, length);
    // Streaming stores may be seen late and out of order: whoever seals a slot comes after this.
    _mm_sfence();
}

#else

static void copy_past_caches(char *target, const char *source, size_t length)
{
    memcpy(target, source, length);
}

#endif

static PyObject *copy(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long target, source;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "KKn", &target, &source, &length)) {
        return NULL;
    }
    if (length < 0) {
        return PyErr_Format(PyExc_ValueError, "the length is %zd, not 0 or more", length);
    }
    Py_BEGIN_ALLOW_THREADS
    copy_past_caches((char *)(uintptr_t)target, (const char *)(uintptr_t)source, (size_t)length);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(target_address, source_address, length): the two must not overlap."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "holdfast.checkpoint._streaming",
    .m_doc = "Copies memory past the caches.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__streaming(void)
{
    return PyModuleDef_Init(&definition);
}
