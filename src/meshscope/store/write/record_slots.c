/* The slots of one table's file, and the write of a record into the next one.
 *
 * Twin of `TableWriter._put_mapped`, for the usual case only: seven integers of 64 bits, and the
 * next slot lies in the mapped window. Everything else is handed to `plain`, the writer's own
 * method in Python, before anything was changed; it draws its slot from the same counter.
 *
 * No Python runs between the moment a slot is drawn and the moment its record is whole, so no other
 * thread and no signal handler can come between. Needs the global lock, as the twin does.
 */

#define Py_LIMITED_API 0x030B0000
#include "record_slots.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little-endian: the writer in Python serves this machine"
#endif

#define VERSION 4
#define RECORD_BYTES 64
#define CHECK_SALT UINT64_C(0x9E3779B97F4A7C15)

typedef struct {
    PyObject_HEAD
    uint64_t next;       /* within the epoch */
    int64_t first_byte;  /* from the first record to the window; negative for the first window */
    int64_t num_bytes;   /* of the window; 0 without one */
    Py_buffer window;    /* `obj` is NULL without one */
    PyObject *epoch;     /* what is added to a slot's number: a multiple of 2**64 */
    PyObject *plain;     /* called where the usual case is not given */
} RecordSlots;

static PyTypeObject *slots_type;

static void drop_window(RecordSlots *self) {
    self->num_bytes = 0;
    if (self->window.obj != NULL) PyBuffer_Release(&self->window);
}

static int write_record(PyObject *object, const int64_t words[NUM_WORDS]) {
    RecordSlots *self = (RecordSlots *)object;
    int64_t offset = (int64_t)(self->next * RECORD_BYTES) - self->first_byte;
    if (offset < 0 || offset > self->num_bytes - RECORD_BYTES) return 0;
    uint64_t record[1 + NUM_WORDS];
    uint64_t check = ++self->next * CHECK_SALT;
    for (int i = 0; i < NUM_WORDS; i++) {
        record[1 + i] = (uint64_t)words[i];
        check += (uint64_t)words[i];
    }
    record[0] = check;
    memcpy((char *)self->window.buf + offset, record, RECORD_BYTES);
    return 1;
}

static PyObject *slots_put(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    int64_t words[NUM_WORDS];
    int is_usual = nargs == NUM_WORDS;
    for (int i = 0; is_usual && i < NUM_WORDS; i++) {
        int overflow = 1;
        /* An integer's own value: nothing of the program is called, nothing can be raised. */
        if (PyLong_Check(args[i])) words[i] = PyLong_AsLongLongAndOverflow(args[i], &overflow);
        is_usual = !overflow;
    }
    if (is_usual && write_record(object, words)) Py_RETURN_NONE;
    /* Without it a cycle is being taken apart: the writer is gone. */
    if (((RecordSlots *)object)->plain == NULL) Py_RETURN_NONE;
    PyObject *given = PyTuple_New(nargs);
    if (given == NULL) return NULL;
    for (Py_ssize_t i = 0; i < nargs; i++) PyTuple_SetItem(given, i, Py_NewRef(args[i]));
    PyObject *plain = Py_NewRef(((RecordSlots *)object)->plain);
    PyObject *result = PyObject_Call(plain, given, NULL);
    Py_DECREF(plain);
    Py_DECREF(given);
    return result;
}

static PyObject *slots_map(PyObject *object, PyObject *args) {
    RecordSlots *self = (RecordSlots *)object;
    long long first_byte;
    PyObject *window;
    if (!PyArg_ParseTuple(args, "LO", &first_byte, &window)) return NULL;
    Py_buffer found = {0};
    if (window != Py_None && PyObject_GetBuffer(window, &found, PyBUF_WRITABLE) < 0) return NULL;
    drop_window(self);
    if (window != Py_None) {
        self->window = found;
        self->first_byte = first_byte;
        self->num_bytes = found.len;
    }
    Py_RETURN_NONE;
}

static PyObject *slots_next(PyObject *object) {
    RecordSlots *self = (RecordSlots *)object;
    PyObject *slot = PyLong_FromUnsignedLongLong(self->next);
    if (slot == NULL) return NULL;
    PyObject *sum = PyNumber_Add(self->epoch, slot);
    Py_DECREF(slot);
    if (sum != NULL) self->next++;
    return sum;
}

static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *epoch, *plain;
    unsigned long long first;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "RecordSlots takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!KO", &PyLong_Type, &epoch, &first, &plain)) return NULL;
    PyObject *(*allocate)(PyTypeObject *, Py_ssize_t) =
        (PyObject * (*)(PyTypeObject *, Py_ssize_t)) PyType_GetSlot(type, Py_tp_alloc);
    RecordSlots *self = (RecordSlots *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->next = first;
    self->epoch = Py_NewRef(epoch);
    self->plain = Py_NewRef(plain);
    return (PyObject *)self;
}

static int slots_traverse(PyObject *object, visitproc visit, void *arg) {
    RecordSlots *self = (RecordSlots *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->epoch);
    Py_VISIT(self->plain);
    return 0;
}

static int slots_clear(PyObject *object) {
    RecordSlots *self = (RecordSlots *)object;
    drop_window(self);
    Py_CLEAR(self->plain);
    return 0;
}

static void slots_dealloc(PyObject *object) {
    RecordSlots *self = (RecordSlots *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    drop_window(self);
    Py_CLEAR(self->epoch);
    Py_CLEAR(self->plain);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef slots_methods[] = {
    {"put", (PyCFunction)(void (*)(void))slots_put, METH_FASTCALL, "Writes one record."},
    {"map", slots_map, METH_VARARGS,
     "map(first_byte, window): records go into this window, first_byte after the first record's "
     "place; None takes the window away."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_traverse, slots_traverse},
    {Py_tp_clear, slots_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, slots_next},
    {Py_tp_methods, slots_methods},
    {Py_tp_doc, "RecordSlots(epoch, first, plain): counts slots and writes records into them."},
    {0, NULL},
};

static PyType_Spec slots_spec = {
    .name = "meshscope.store.write._record_slots_native.RecordSlots",
    .basicsize = sizeof(RecordSlots),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots_slots,
};

/* --- files that somebody cuts short ------------------------------------------------------------
 *
 * A write to a mapped page that its file no longer has is SIGBUS, which would end the training. For
 * pages of guarded maps, and for no others, the handler puts an empty page of memory there, and the
 * write goes on; what it wrote is lost, as the file is. Any other SIGBUS goes to the handler that was
 * there before (Python's faulthandler, say), or does what it did. One that is set later stays as it is.
 */

#define MAX_GUARDED 256

static struct {
    volatile uintptr_t first, end;
} guarded[MAX_GUARDED];
static volatile sig_atomic_t num_cut_pages;
static uintptr_t page_bytes;
static struct sigaction handler_before;
static int is_installed;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; info->si_code > 0 && i < MAX_GUARDED; i++) {
        if (at < guarded[i].first || at >= guarded[i].end) continue;
        void *page = (void *)(at & ~(page_bytes - 1));
        int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) break;
        num_cut_pages++;
        return;
    }
    if (info->si_code <= 0 && (handler_before.sa_flags & SA_SIGINFO)) {
        handler_before.sa_sigaction(number, info, context);
    } else if (info->si_code <= 0 && handler_before.sa_handler == SIG_IGN) {
        return;
    } else if (info->si_code <= 0 && handler_before.sa_handler != SIG_DFL) {
        handler_before.sa_handler(number);
    } else {
        /* A fault comes again, and finds what it would find without us. */
        sigaction(number, &handler_before, NULL);
        if (info->si_code <= 0) raise(number);
    }
}

/* Whether the handler is in place: nobody has set one after it. */
static int is_handling(void) {
    struct sigaction now, ours;
    if (sigaction(SIGBUS, NULL, &now) != 0) return 0;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return 1;
    if (is_installed) return 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    handler_before = now; /* before ours is in place: it may be needed at once */
    is_installed = sigaction(SIGBUS, &ours, NULL) == 0;
    return is_installed;
}

static PyObject *guard_refs[MAX_GUARDED];

/* A map is gone. In C: a callback in Python could swallow an interrupt. */
static PyObject *forget_map(PyObject *place, PyObject *reference) {
    (void)reference;
    long i = PyLong_AsLong(place);
    guarded[i].end = 0;
    Py_CLEAR(guard_refs[i]);
    Py_RETURN_NONE;
}

static PyMethodDef forget_definition = {"forget_map", forget_map, METH_O, NULL};

static PyObject *guard(PyObject *module, PyObject *map) {
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(map, &view, PyBUF_WRITABLE) < 0) return NULL;
    uintptr_t first = (uintptr_t)view.buf, end = first + (uintptr_t)view.len;
    PyBuffer_Release(&view);
    int i = 0;
    while (i < MAX_GUARDED && guard_refs[i] != NULL) i++;
    if (i == MAX_GUARDED || !is_handling()) Py_RETURN_FALSE;
    PyObject *place = PyLong_FromLong(i);
    PyObject *forget = place == NULL ? NULL : PyCFunction_NewEx(&forget_definition, place, NULL);
    guard_refs[i] = forget == NULL ? NULL : PyWeakref_NewRef(map, forget);
    Py_XDECREF(place);
    Py_XDECREF(forget);
    if (guard_refs[i] == NULL) return NULL;
    guarded[i].first = first;
    guarded[i].end = end;
    Py_RETURN_TRUE;
}

static PyObject *count_cut_pages(PyObject *module, PyObject *nothing) {
    (void)module;
    (void)nothing;
    return PyLong_FromLong((long)num_cut_pages);
}

static PyMethodDef module_methods[] = {
    {"guard", guard, METH_O, "guard(map): whether it is guarded from now on, until it is gone."},
    {"count_cut_pages", count_cut_pages, METH_NOARGS, "Pages that were written after their file."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_record_slots_native",
    .m_doc = "Writes records into a mapped file.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__record_slots_native(void) {
    static RecordSlotsApi api;
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL) return NULL;
    slots_type = (PyTypeObject *)PyType_FromSpec(&slots_spec);
    api.type = slots_type;
    api.put = (PyCFunction)(void (*)(void))slots_put;
    api.write = write_record;
    PyObject *capsule = slots_type == NULL ? NULL : PyCapsule_New(&api, RECORD_SLOTS_CAPSULE, NULL);
    if (capsule == NULL || PyModule_AddType(module, slots_type) < 0 ||
        PyModule_AddObjectRef(module, "C_API", capsule) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_XDECREF(capsule);
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(capsule);
    return module;
}
