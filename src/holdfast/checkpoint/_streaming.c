// SPDX-License-Identifier: Apache-2.0
// Copies memory past the caches, and computes the CRC-32C of what it copies on the way.
//
// A checkpoint is gigabytes that nobody reads soon. An ordinary copy first reads the lines that it
// is about to overwrite, and throws what the training needs out of the caches. Streaming stores do
// neither. The C library would use them by itself for large copies, but what it takes for large
// depends on the cache that a virtual machine pretends to have.
//
// A digest that is computed later reads all of it from memory once more, beside the training. Here
// the bytes are in registers anyway, and memory is the limit: the CRC costs no time.
//
// 16 bytes at a time are all it takes. With AVX2 it was not faster.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define LINE 64
#define AHEAD 1024  // How far before its use a line is asked for.
#define LINES_AT_ONCE 8  // Between two pauses of a copy that takes its time.
#define LINES_A_LOOK 2048  // Between two looks at the clock.
#define PAUSES_MAX 64
#define WITH_CRC __attribute__((target("sse4.2,pclmul")))

// The bytes are a polynomial over GF(2), and its CRC is a remainder. Bits that stand n places before
// others may be replaced by their product with x^n modulo CRC-32C's polynomial: so 16 bytes are
// folded into the 16 that stand 64, or 16, behind them. Each factor is for eight of the 16 bytes;
// bit-reversed, as the CRC is, and shifted by one, as a product of two reversed factors needs it.
#define FOLD_BY_64 _mm_set_epi64x(0x9e4addf8, 0x740eef02)   // x^480, x^544
#define FOLD_BY_16 _mm_set_epi64x(0x14cd00bd6, 0xf20c0dfe)  // x^96, x^160

WITH_CRC static inline __m128i fold(__m128i into, __m128i bytes, __m128i factors)
{
    __m128i low = _mm_clmulepi64_si128(bytes, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(bytes, factors, 0x11);
    return _mm_xor_si128(into, _mm_xor_si128(low, high));
}

// For what is shorter than some lines. `crc` is not inverted, here and in copy_lines.
WITH_CRC static uint32_t copy_few(char *target, const char *source, size_t length, uint32_t crc)
{
    memcpy(target, source, length);
    for (; length >= 8; source += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, source, sizeof word);
        crc = (uint32_t)_mm_crc32_u64(crc, word);
    }
    for (; length > 0; source++, length--) {
        crc = _mm_crc32_u8(crc, (unsigned char)*source);
    }
    return crc;
}

// One line or more; the target begins with a line. Waits for `pauses` after every few lines.
WITH_CRC static uint32_t copy_lines(char *target, const char *source, size_t lines, uint32_t crc,
                                    int pauses)
{
    const __m128i factors = FOLD_BY_64;
    __m128i a = _mm_cvtsi32_si128((int)crc), b = _mm_setzero_si128(), c = b, d = b;
    for (size_t line = 0; line < lines; line++, target += LINE, source += LINE) {
        if (pauses > 0 && line % LINES_AT_ONCE == 0) {
            for (int left = pauses; left > 0; left--) {
                _mm_pause();
            }
        }
        // Never faults, so it may look past the end. NTA: nor need the source stay in the caches.
        _mm_prefetch((const char *)((uintptr_t)source + AHEAD), _MM_HINT_NTA);
        __m128i next_a = _mm_loadu_si128((const __m128i *)source);
        __m128i next_b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i next_c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i next_d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, next_a);
        _mm_stream_si128((__m128i *)(target + 16), next_b);
        _mm_stream_si128((__m128i *)(target + 32), next_c);
        _mm_stream_si128((__m128i *)(target + 48), next_d);
        if (line == 0) {
            a = _mm_xor_si128(a, next_a), b = next_b, c = next_c, d = next_d;
        } else {
            a = fold(next_a, a, factors), b = fold(next_b, b, factors);
            c = fold(next_c, c, factors), d = fold(next_d, d, factors);
        }
    }
    a = fold(d, fold(c, fold(b, a, FOLD_BY_16), FOLD_BY_16), FOLD_BY_16);
    crc = (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(a));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(a, 1));
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// At about `pace` bytes a second, in steps that are short even for memory. How long a pause takes
// differs from one processor to the next, so their number follows the clock.
WITH_CRC static uint32_t copy_at_pace(char *target, const char *source, size_t lines, uint32_t crc,
                                      double pace)
{
    static _Thread_local int pauses = 0;
    double began = seconds_now();
    while (lines > 0) {
        size_t next = lines < LINES_A_LOOK ? lines : LINES_A_LOOK;
        crc = copy_lines(target, source, next, crc, pauses);
        double ended = seconds_now();
        bool is_fast = (double)(next * LINE) > pace * (ended - began);
        if (is_fast && pauses < PAUSES_MAX) {
            pauses++;
        } else if (!is_fast && pauses > 0) {
            pauses--;
        }
        target += next * LINE, source += next * LINE, lines -= next, began = ended;
    }
    return crc;
}

WITH_CRC static uint32_t copy_past_caches(char *target, const char *source, size_t length,
                                          uint32_t crc, double pace)
{
    size_t head = (size_t)(-(uintptr_t)target) % LINE;
    if (head > length) {
        head = length;
    }
    size_t lines = (length - head) / LINE;
    size_t tail = head + lines * LINE;
    crc = copy_few(target, source, head, ~crc);
    if (lines > 0 && pace > 0) {
        crc = copy_at_pace(target + head, source + head, lines, crc, pace);
    } else if (lines > 0) {
        crc = copy_lines(target + head, source + head, lines, crc, 0);
    }
    crc = copy_few(target + tail, source + tail, length - tail, crc);
    // Streaming stores may be seen late and out of order: whoever seals a slot comes after this.
    _mm_sfence();
    return ~crc;
}

static int has_what_it_takes(void)
{
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

#else

static uint32_t copy_past_caches(char *target, const char *source, size_t length, uint32_t crc,
                                 double pace)
{
    (void)target, (void)source, (void)length, (void)pace;
    return crc;
}

static int has_what_it_takes(void)
{
    return 0;
}

#endif

static PyObject *copy(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long target, source;
    Py_ssize_t length;
    unsigned int crc = 0;
    double pace = 0;
    if (!PyArg_ParseTuple(args, "KKn|Id", &target, &source, &length, &crc, &pace)) {
        return NULL;
    }
    if (length < 0) {
        return PyErr_Format(PyExc_ValueError, "the length is %zd, not 0 or more", length);
    }
    Py_BEGIN_ALLOW_THREADS
    crc = copy_past_caches((char *)(uintptr_t)target, (const char *)(uintptr_t)source,
                           (size_t)length, crc, pace);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}

static int check_machine(PyObject *module)
{
    (void)module;
    if (!has_what_it_takes()) {
        PyErr_SetString(PyExc_ImportError, "this machine has no SSE4.2 with PCLMULQDQ");
        return -1;
    }
    return 0;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(target_address, source_address, length, crc=0, pace=0): the CRC-32C of these bytes,\n"
     "behind others whose CRC-32C is `crc`. The two must not overlap. With `pace`, not faster than\n"
     "so many bytes a second."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, check_machine},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "holdfast.checkpoint._streaming",
    .m_doc = "Copies memory past the caches, with its CRC-32C.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__streaming(void)
{
    return PyModuleDef_Init(&definition);
}
