/* The hot path of a step: fields of the timeline and of the hooks, and the usual way through them.
 *
 * After a step's matrix products nothing of Python is left in the caches, and a line of Python costs
 * a good part of a microsecond. So the fields stand here, next to each other, as plain integers, and
 * what happens in every usual step is done without Python. `native_steps.py` puts the methods of
 * the classes in Python on top of these types: they stay the one definition of what is right.
 *
 * Each function first looks whether all is as usual, and calls its twin in Python (`plain_…`)
 * where it is not, before it has changed anything or read the clock. What is done here is what the
 * twin does, in the same order, so that records, and errors caught, are the same. A change to
 * `hooks.py`, `timeline.py` or `step_inference.py` that a usual step would notice is made here
 * too; `tests/unit/capture/test_native_steps.py` compares both.
 */

#define Py_LIMITED_API 0x030B0000
#include "../../store/write/record_slots.h"

#include <stddef.h>
#include <structmember.h>
#include <time.h>

#define VERSION 4
#define MISSING (-1)
#define NUM_STAMPS 8
#define NUM_STAMP_WORDS 16
#define FIRST_STAMP_WORD 3
#define STAMP_FACTOR 257
#define NO_SHORT_CUT 4
#define MAX_PACKED_NS 0xFFFFFFFFLL
#define MAX_GAP_NS 0x7FFFFFFFLL
enum { FORWARD = 1, BACKWARD = 2, OPTIMIZER = 3 };
static long long phase_ids[NO_SHORT_CUT]; /* name ids of data, forward, backward, optimizer */

static PyTypeObject *timeline_type, *stack_type, *steps_type, *hooks_type;
static PyObject *monotonic_ns; /* time.monotonic_ns: what it reads is read here without a call */
static RecordSlotsApi *slots_api;
/* Names of attributes and methods, made once. */
#define NAMES(X)                                                                                  \
    X(training) X(ndim) X(dtype) X(numel) X(put) X(input_ids) X(tensors) X(_put_usual_phases)     \
    X(detach) X(see_output) X(size) X(_count_batch) X(num_items_in_batch) X(param_groups)      \
    X(lr) X(append) X(is_cpu) X(item)                                                             \
    X(_leave_short_cut) X(plain_enter) X(plain_leave) X(plain_end_step)                           \
    X(plain_forward_begins) X(plain_forward_ends) X(plain_backward_begins)                        \
    X(plain_backward_ends) X(plain_optimizer_begins) X(plain_optimizer_ends)
#define DECLARE(name) static PyObject *text_##name;
NAMES(DECLARE)
static PyObject *empty_tuple, *zero;

/* --- fields -------------------------------------------------------------------------------- */

typedef struct { /* a buffer of 64-bit integers that Python writes into as well */
    Py_buffer buffer; /* `obj` is NULL before the first is given */
    int64_t *words;
} Words;

typedef struct {
    PyObject_HEAD
    long long children_ns, name_id, start_ns, thread_bits;
    PyObject *objects[2]; /* mark, outer */
} Stack;

typedef struct {
    PyObject_HEAD
    long long done_phase, epoch_ns, input_samples, input_tokens, last_flags, last_samples,
        last_step, last_tokens, microbatch, microbatch_stride, next_visit_ns, open_phase, own_ns, own_thread, sample_every_steps, step,
        step_flags, step_start_ns;
    char has_stamp_file, is_sampled;
    Words stamps, stored;
    Stack *stack;
    PyObject *clock, *on_visit, *phases, *spans, *steps;
    PyObject *others[3]; /* _other_stacks, actions, device */
} Timeline;

typedef struct {
    PyObject_HEAD
    long long batch_start_ns, ended_microbatches, ended_start_ns, ended_step, num_updates;
    char has_fetched, has_several, is_explicit;
    PyObject *ended_optimizers;
    PyObject *others[2]; /* _stepped, _timeline */
} Steps;

typedef struct {
    PyObject_HEAD
    long long backward_depth, batch_module, forward_depth, forward_phase, loss_step, next_signals_ns,
        next_signals_step, num_forwards, open_optimizer, optimizer_depth, optimizer_microbatch, thread;
    char is_gradient, is_normalized, takes_signals, trains_in_eval_mode, was_eval_with_grad;
    Timeline *timeline;
    Steps *steps;
    PyObject *caught, *clock, *ends_after_backward, *forward_module, *is_grad_enabled, *tensor,
        *token_types, *on_pass_end, *losses, *older, *previous, *rate, *recent,
        *unscaled;
    PyObject *others[1]; /* on_unseen_forward */
} Hooks;

#define INTEGER(type, name, field) {name, T_LONGLONG, offsetof(type, field), 0, NULL}
#define FLAG(type, name, field) {name, T_BOOL, offsetof(type, field), 0, NULL}
#define OBJECT(type, name, field) {name, T_OBJECT_EX, offsetof(type, field), 0, NULL}
#define END {NULL, 0, 0, 0, NULL}

static PyMemberDef stack_members[] = {
    INTEGER(Stack, "children_ns", children_ns), INTEGER(Stack, "name_id", name_id),
    INTEGER(Stack, "start_ns", start_ns),       INTEGER(Stack, "thread_bits", thread_bits),
    OBJECT(Stack, "mark", objects[0]),          OBJECT(Stack, "outer", objects[1]),
    END,
};

static PyMemberDef timeline_members[] = {
    INTEGER(Timeline, "done_phase", done_phase),
    INTEGER(Timeline, "epoch_ns", epoch_ns),
    INTEGER(Timeline, "input_samples", input_samples),
    INTEGER(Timeline, "input_tokens", input_tokens),
    INTEGER(Timeline, "_last_flags", last_flags),
    INTEGER(Timeline, "_last_samples", last_samples),
    INTEGER(Timeline, "last_step", last_step),
    INTEGER(Timeline, "_last_tokens", last_tokens),
    INTEGER(Timeline, "microbatch", microbatch),
    INTEGER(Timeline, "microbatch_stride", microbatch_stride),
    INTEGER(Timeline, "next_visit_ns", next_visit_ns),
    INTEGER(Timeline, "open_phase", open_phase),
    INTEGER(Timeline, "own_ns", own_ns),
    INTEGER(Timeline, "_own_thread", own_thread),
    INTEGER(Timeline, "_sample_every_steps", sample_every_steps),
    INTEGER(Timeline, "step", step),
    INTEGER(Timeline, "step_flags", step_flags),
    INTEGER(Timeline, "step_start_ns", step_start_ns),
    FLAG(Timeline, "_has_stamp_file", has_stamp_file),
    FLAG(Timeline, "is_sampled", is_sampled),
    OBJECT(Timeline, "_clock", clock),
    OBJECT(Timeline, "on_visit", on_visit),
    OBJECT(Timeline, "phases", phases),
    OBJECT(Timeline, "spans", spans),
    OBJECT(Timeline, "steps", steps),
    OBJECT(Timeline, "_other_stacks", others[0]),
    OBJECT(Timeline, "actions", others[1]),
    OBJECT(Timeline, "device", others[2]),
    END,
};

static PyMemberDef steps_members[] = {
    INTEGER(Steps, "_batch_start_ns", batch_start_ns),
    INTEGER(Steps, "_ended_microbatches", ended_microbatches),
    INTEGER(Steps, "_ended_start_ns", ended_start_ns),
    INTEGER(Steps, "_ended_step", ended_step),
    INTEGER(Steps, "num_updates", num_updates),
    FLAG(Steps, "has_fetched", has_fetched),
    FLAG(Steps, "has_several", has_several),
    FLAG(Steps, "is_explicit", is_explicit),
    OBJECT(Steps, "_ended_optimizers", ended_optimizers),
    OBJECT(Steps, "_stepped", others[0]),
    OBJECT(Steps, "_timeline", others[1]),
    END,
};

static PyMemberDef hooks_members[] = {
    INTEGER(Hooks, "_backward_depth", backward_depth),
    INTEGER(Hooks, "_batch_module", batch_module),
    INTEGER(Hooks, "_forward_depth", forward_depth),
    INTEGER(Hooks, "_forward_phase", forward_phase),
    INTEGER(Hooks, "_loss_step", loss_step),
    INTEGER(Hooks, "_next_signals_ns", next_signals_ns),
    INTEGER(Hooks, "_next_signals_step", next_signals_step),
    INTEGER(Hooks, "_num_forwards", num_forwards),
    INTEGER(Hooks, "_open_optimizer", open_optimizer),
    INTEGER(Hooks, "_optimizer_depth", optimizer_depth),
    INTEGER(Hooks, "_optimizer_microbatch", optimizer_microbatch),
    INTEGER(Hooks, "_thread", thread),
    FLAG(Hooks, "_is_gradient", is_gradient),
    FLAG(Hooks, "_is_normalized", is_normalized),
    FLAG(Hooks, "_takes_signals", takes_signals),
    FLAG(Hooks, "_trains_in_eval_mode", trains_in_eval_mode),
    FLAG(Hooks, "_was_eval_with_grad", was_eval_with_grad),
    OBJECT(Hooks, "_caught", caught),
    OBJECT(Hooks, "_clock", clock),
    OBJECT(Hooks, "_ends_after_backward", ends_after_backward),
    OBJECT(Hooks, "_forward_module", forward_module),
    OBJECT(Hooks, "_is_grad_enabled", is_grad_enabled),
    OBJECT(Hooks, "_tensor", tensor),
    OBJECT(Hooks, "_token_types", token_types),
    OBJECT(Hooks, "on_pass_end", on_pass_end),
    OBJECT(Hooks, "losses", losses),
    OBJECT(Hooks, "_older", older),
    OBJECT(Hooks, "_previous", previous),
    OBJECT(Hooks, "_rate", rate),
    OBJECT(Hooks, "_recent", recent),
    OBJECT(Hooks, "_unscaled", unscaled),
    OBJECT(Hooks, "on_unseen_forward", others[0]),
    END,
};

/* A reference to one of our own types: checked when it is set, so that it can be read unchecked. */
typedef struct {
    size_t offset;
    PyTypeObject **type;
} TypedField;

static TypedField timeline_stack = {offsetof(Timeline, stack), &stack_type};
static TypedField hooks_timeline = {offsetof(Hooks, timeline), &timeline_type};
static TypedField hooks_steps = {offsetof(Hooks, steps), &steps_type};

static PyObject *get_typed(PyObject *self, void *closure) {
    PyObject *value = *(PyObject **)((char *)self + ((TypedField *)closure)->offset);
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "not set yet");
        return NULL;
    }
    return Py_NewRef(value);
}

static int set_typed(PyObject *self, PyObject *value, void *closure) {
    TypedField *field = closure;
    if (value == NULL || !PyObject_TypeCheck(value, *field->type)) {
        PyErr_SetString(PyExc_TypeError, "a compiled field takes objects of compiled types only");
        return -1;
    }
    PyObject **place = (PyObject **)((char *)self + field->offset);
    PyObject *before = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(before);
    return 0;
}

typedef struct {
    size_t offset;
    Py_ssize_t num_words;
} WordsField;

static WordsField timeline_stamps = {offsetof(Timeline, stamps), NUM_STAMPS};
static WordsField timeline_stored = {offsetof(Timeline, stored), NUM_STAMP_WORDS};

static PyObject *get_words(PyObject *self, void *closure) {
    Words *field = (Words *)((char *)self + ((WordsField *)closure)->offset);
    if (field->buffer.obj == NULL) {
        PyErr_SetString(PyExc_AttributeError, "not set yet");
        return NULL;
    }
    return Py_NewRef(field->buffer.obj);
}

static void drop_words(Words *field) {
    field->words = NULL;
    if (field->buffer.obj != NULL) PyBuffer_Release(&field->buffer);
}

static int set_words(PyObject *self, PyObject *value, void *closure) {
    WordsField *description = closure;
    Words *field = (Words *)((char *)self + description->offset);
    Py_buffer found;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "stamps cannot be deleted");
        return -1;
    }
    if (PyObject_GetBuffer(value, &found, PyBUF_WRITABLE) < 0) return -1;
    if (found.len != description->num_words * 8 || (uintptr_t)found.buf % 8) {
        PyBuffer_Release(&found);
        PyErr_SetString(PyExc_ValueError, "a buffer of another size than stamps have");
        return -1;
    }
    drop_words(field);
    field->buffer = found;
    field->words = found.buf;
    return 0;
}

static PyGetSetDef timeline_getset[] = {
    {"stack", get_typed, set_typed, NULL, &timeline_stack},
    {"stamps", get_words, set_words, NULL, &timeline_stamps},
    {"stored", get_words, set_words, NULL, &timeline_stored},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef hooks_getset[] = {
    {"_timeline", get_typed, set_typed, NULL, &hooks_timeline},
    {"_steps", get_typed, set_typed, NULL, &hooks_steps},
    {NULL, NULL, NULL, NULL, NULL},
};

/* --- life of an object -------------------------------------------------------------------------- */

static int visit_fields(PyObject *self, const PyMemberDef *members, const PyGetSetDef *typed,
                        visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (; members->name != NULL; members++) {
        if (members->type == T_OBJECT_EX) Py_VISIT(*(PyObject **)((char *)self + members->offset));
    }
    for (; typed != NULL && typed->name != NULL; typed++) {
        if (typed->get != get_typed) continue;
        Py_VISIT(*(PyObject **)((char *)self + ((TypedField *)typed->closure)->offset));
    }
    return 0;
}

static void clear_fields(PyObject *self, const PyMemberDef *members, const PyGetSetDef *typed) {
    for (; members->name != NULL; members++) {
        if (members->type == T_OBJECT_EX) Py_CLEAR(*(PyObject **)((char *)self + members->offset));
    }
    for (; typed != NULL && typed->name != NULL; typed++) {
        if (typed->get == get_typed) {
            Py_CLEAR(*(PyObject **)((char *)self + ((TypedField *)typed->closure)->offset));
        } else {
            drop_words((Words *)((char *)self + ((WordsField *)typed->closure)->offset));
        }
    }
}

#define LIFE(name, members, typed)                                                \
    static int name##_traverse(PyObject *self, visitproc visit, void *arg) {      \
        return visit_fields(self, members, typed, visit, arg);                    \
    }                                                                             \
    static int name##_clear(PyObject *self) {                                     \
        clear_fields(self, members, typed);                                       \
        return 0;                                                                 \
    }                                                                             \
    static void name##_dealloc(PyObject *self) {                                  \
        PyTypeObject *type = Py_TYPE(self);                                       \
        PyObject_GC_UnTrack(self);                                                \
        clear_fields(self, members, typed);                                       \
        ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);                       \
        Py_DECREF(type);                                                          \
    }

LIFE(stack, stack_members, NULL)
LIFE(timeline, timeline_members, timeline_getset)
LIFE(steps, steps_members, NULL)
LIFE(hooks, hooks_members, hooks_getset)

/* --- small parts -------------------------------------------------------------------------------- */

/* -1 with an error set when a clock in Python raised or gave no integer. */
static int read_clock(PyObject *clock, long long *now_ns) {
    if (clock == monotonic_ns) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        *now_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
        return 0;
    }
    Py_INCREF(clock);
    PyObject *given = PyObject_CallNoArgs(clock);
    Py_DECREF(clock);
    if (given == NULL) return -1;
    *now_ns = PyLong_AsLongLong(given);
    Py_DECREF(given);
    return *now_ns == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Calls a method of the object with the same arguments, most often `plain_…`. */
static PyObject *call_method(PyObject *self, PyObject *name, PyObject *const *args,
                             Py_ssize_t nargs) {
    if (nargs > 4) {
        PyErr_SetString(PyExc_TypeError, "more arguments than any of these methods takes");
        return NULL;
    }
    return PyObject_CallMethodObjArgs(self, name, nargs > 0 ? args[0] : NULL,
                                      nargs > 1 ? args[1] : NULL, nargs > 2 ? args[2] : NULL,
                                      nargs > 3 ? args[3] : NULL, NULL);
}

static int do_method(PyObject *self, PyObject *name) {
    PyObject *result = call_method(self, name, NULL, 0);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* An argument as an integer of 64 bits; 0 where it is something else. Raises nothing. */
static int take_integer(PyObject *given, long long *number) {
    int overflow = 1;
    if (PyLong_Check(given)) *number = PyLong_AsLongLongAndOverflow(given, &overflow);
    return !overflow;
}

/* -1 with an error set when the sink raised. */
static int put_record(PyObject *sink, const int64_t words[NUM_WORDS]) {
    PyObject *put = PyObject_GetAttr(sink, text_put);
    if (put == NULL) return -1;
    if (PyCFunction_Check(put) && PyCFunction_GetFunction(put) == slots_api->put) {
        if (slots_api->write(PyCFunction_GetSelf(put), words)) {
            Py_DECREF(put);
            return 0;
        }
    }
    PyObject *result = PyObject_CallFunction(
        put, "LLLLLLL", (long long)words[0], (long long)words[1], (long long)words[2],
        (long long)words[3], (long long)words[4], (long long)words[5], (long long)words[6]);
    Py_DECREF(put);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* A stamp of the open step, here and in its file; -1 with an error where it does not fit there. */
static int stamp(Timeline *timeline, int index, long long time_ns) {
    long long stored;
    timeline->stamps.words[index] = time_ns;
    if (__builtin_sub_overflow(time_ns, timeline->epoch_ns, &stored) ||
        __builtin_mul_overflow(stored, STAMP_FACTOR, &stored)) {
        PyErr_SetString(PyExc_ValueError, "memoryview: invalid value for format 'q'");
        return -1;
    }
    timeline->stored.words[FIRST_STAMP_WORD + index] = stored;
    return 0;
}

static int is_whole(Timeline *timeline) {
    return timeline != NULL && timeline->stack != NULL && timeline->stamps.words != NULL &&
           timeline->stored.words != NULL && timeline->clock != NULL;
}

/* --- timeline ----------------------------------------------------------------------------------- */

static PyObject *timeline_enter(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Timeline *self = (Timeline *)object;
    long long name_id = 0, start_ns = 0;
    if (nargs == 3 && is_whole(self) && args[0] == (PyObject *)self->stack &&
        !self->stack->name_id && self->open_phase < 0 && take_integer(args[1], &name_id) &&
        take_integer(args[2], &start_ns)) {
        int phase = NO_SHORT_CUT - 1;
        while (phase >= 0 && phase_ids[phase] != name_id) phase--;
        /* A packed phase is one of microbatch 0. */
        if (phase > self->done_phase && (!self->microbatch || phase == OPTIMIZER)) {
            self->open_phase = phase;
            if (stamp(self, 2 * phase, start_ns) < 0) return NULL;
            Py_RETURN_NONE;
        }
    }
    return call_method(object, text_plain_enter, args, nargs);
}

static PyObject *timeline_leave(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Timeline *self = (Timeline *)object;
    long long name_id = 0, end_ns = 0, flags = 0;
    if ((nargs == 3 || (nargs == 4 && take_integer(args[3], &flags))) && is_whole(self) &&
        args[0] == (PyObject *)self->stack && self->open_phase >= 0 &&
        self->open_phase < NO_SHORT_CUT && !flags && take_integer(args[1], &name_id) &&
        phase_ids[self->open_phase] == name_id && take_integer(args[2], &end_ns)) {
        int phase = (int)self->open_phase;
        self->open_phase = -1;
        self->done_phase = phase;
        if (stamp(self, 2 * phase + 1, end_ns) < 0) return NULL;
        Py_RETURN_NONE;
    }
    return call_method(object, text_plain_leave, args, nargs);
}

/* The stamps taken on the short cut as one record, as `_put_usual_phases` does. */
static int put_usual_phases(Timeline *self) {
    const int64_t *stamps = self->stamps.words;
    int64_t words[NUM_WORDS] = {stamps[0], stamps[1], stamps[2], stamps[3], stamps[4], stamps[5], 0};
    if (stamps[6]) {
        int64_t gap_ns = stamps[6] - stamps[5], duration_ns = stamps[7] - stamps[6];
        if (!stamps[5] || gap_ns < 0 || gap_ns > MAX_GAP_NS || duration_ns < 0 ||
            duration_ns > MAX_PACKED_NS || !(gap_ns | duration_ns)) {
            return do_method((PyObject *)self, text__put_usual_phases);
        }
        words[6] = gap_ns << 32 | duration_ns;
    }
    if (stamps[2] || stamps[0] || stamps[4]) {
        PyObject *phases = Py_NewRef(self->phases);
        int failed = put_record(phases, words);
        Py_DECREF(phases);
        if (failed) return -1;
    }
    if (self->stamps.words != NULL) {
        for (int i = 0; i < NUM_STAMPS; i++) self->stamps.words[i] = 0;
    }
    self->done_phase = -1;
    return 0;
}

/* The open step ends and is written down, as `Timeline.end_step` does. */
static int end_step(Timeline *self, long long end_ns, long long flags) {
    long long start_ns = self->step_start_ns, step = self->step;
    if (!start_ns) return 0;
    flags |= self->step_flags;
    self->last_flags = self->step_flags;
    if (end_ns >= self->next_visit_ns) {
        PyObject *on_visit = Py_NewRef(self->on_visit);
        PyObject *result = PyObject_CallFunction(on_visit, "LL", step, end_ns);
        Py_DECREF(on_visit);
        Py_XDECREF(result);
        if (result == NULL) return -1;
    }
    if (self->open_phase >= 0 && do_method((PyObject *)self, text__leave_short_cut) < 0) return -1;
    if (-1 < self->done_phase && self->done_phase < NO_SHORT_CUT && put_usual_phases(self) < 0) {
        return -1;
    }
    long long own_ns = MISSING;
    if (self->is_sampled) {
        if (read_clock(self->clock, &own_ns) < 0) return -1;
        own_ns += self->own_ns - end_ns;
    }
    int64_t words[NUM_WORDS] = {
        step, start_ns, end_ns, self->microbatch | (int64_t)((uint64_t)flags << 32), own_ns,
        self->input_tokens ? self->input_tokens : MISSING, self->input_samples,
    };
    PyObject *sink = Py_NewRef(self->steps);
    int failed = put_record(sink, words);
    Py_DECREF(sink);
    if (failed) return -1;
    self->last_step = step++;
    self->step = step;
    self->step_start_ns = self->microbatch = self->own_ns = 0;
    self->last_tokens = self->input_tokens;
    self->last_samples = self->input_samples;
    self->input_tokens = self->input_samples = 0;
    self->is_sampled = self->sample_every_steps > 0 && step % self->sample_every_steps == 0;
    return 0;
}

static int can_end_step(Timeline *self) {
    return is_whole(self) && self->steps != NULL && self->phases != NULL && self->on_visit != NULL;
}

static PyObject *timeline_end_step(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Timeline *self = (Timeline *)object;
    long long end_ns = 0, flags = 0;
    int is_usual = (nargs == 1 || (nargs == 2 && take_integer(args[1], &flags))) &&
                   take_integer(args[0], &end_ns) && can_end_step(self);
    if (!is_usual) return call_method(object, text_plain_end_step, args, nargs);
    if (end_step(self, end_ns, flags) < 0) return NULL;
    Py_RETURN_NONE;
}

/* --- hooks -------------------------------------------------------------------------------------- */

/* Hands the error that is set to the guard. What is no Exception (an interrupt) goes on. */
static PyObject *hand_to_guard(Hooks *self, const char *site) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyObject *kind, *error, *traceback;
    PyErr_Fetch(&kind, &error, &traceback);
    PyErr_NormalizeException(&kind, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    PyObject *caught = Py_NewRef(self->caught);
    PyObject *result = PyObject_CallFunction(caught, "sO", site, error);
    Py_DECREF(caught);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* A step that measures what we cost adds what went by since `now_ns`. */
static int add_own_time(Hooks *self, Timeline *timeline, long long now_ns) {
    long long later_ns;
    if (!timeline->is_sampled) return 0;
    if (read_clock(self->clock, &later_ns) < 0) return -1;
    timeline->own_ns += later_ns - now_ns;
    return 0;
}

static int is_complete(Hooks *self) {
    return self->steps != NULL && is_whole(self->timeline) && self->caught != NULL &&
           self->clock != NULL;
}

/* Whether the next usual phase can begin on the short cut. */
static int is_free(Timeline *timeline, int phase) {
    return timeline->open_phase < 0 && timeline->done_phase < phase && !timeline->stack->name_id &&
           (!timeline->microbatch || phase == OPTIMIZER);
}

static int begin_phase(Timeline *timeline, int phase, long long now_ns) {
    timeline->open_phase = phase;
    return stamp(timeline, 2 * phase, now_ns);
}

static int end_phase(Timeline *timeline, int phase, long long now_ns) {
    timeline->open_phase = -1;
    timeline->done_phase = phase;
    return stamp(timeline, 2 * phase + 1, now_ns);
}

/* Whether a call or an attribute is true; -1 with an error set. Steals the reference. */
static int is_true(PyObject *given) {
    if (given == NULL) return -1;
    int found = given == Py_True ? 1 : given == Py_False ? 0 : PyObject_IsTrue(given);
    Py_DECREF(given);
    return found;
}

/* Whether this is a training forward of the training thread, outside of any other. */
static int is_training_forward(Hooks *self, PyObject *module) {
    if (self->forward_depth || self->backward_depth || self->is_grad_enabled == NULL ||
        (self->thread && (unsigned long)self->thread != PyThread_get_thread_ident())) {
        return 0;
    }
    PyObject *is_grad_enabled = Py_NewRef(self->is_grad_enabled);
    int found = is_true(PyObject_CallNoArgs(is_grad_enabled));
    Py_DECREF(is_grad_enabled);
    if (found == 1) found = is_true(PyObject_GetAttr(module, text_training));
    return found;
}

/* Whether a step is open, or can be opened here without more ado. */
static int can_have_step(Hooks *self) {
    Timeline *timeline = self->timeline;
    Steps *steps = self->steps;
    return timeline->step_start_ns ||
           !(steps->has_several || steps->is_explicit ||
             (unsigned long)timeline->own_thread != PyThread_get_thread_ident());
}

/* An attribute, or what a method without or with one argument gives, as an integer; -1 and an
 * error. */
static long long read_integer(PyObject *owner, PyObject *name, int is_method, PyObject *argument) {
    PyObject *found = is_method ? PyObject_CallMethodObjArgs(owner, name, argument, NULL)
                                : PyObject_GetAttr(owner, name);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* Samples and tokens of a forward's input: its first dimension, and all of two-dimensional integers. */
static int count_tensor(Hooks *self, Timeline *timeline, PyObject *module, PyObject *given) {
    long long num_dimensions = read_integer(given, text_ndim, 0, NULL);
    if (num_dimensions < 0) return -1;
    if (!num_dimensions) return 0;
    if (!timeline->input_samples || self->batch_module == (long long)(intptr_t)module) {
        self->batch_module = (long long)(intptr_t)module;
        long long num_samples = read_integer(given, text_size, 1, zero);
        if (num_samples < 0) return -1;
        timeline->input_samples += num_samples;
    }
    if (num_dimensions != 2) return 0;
    PyObject *dtype = PyObject_GetAttr(given, text_dtype);
    int found = dtype == NULL ? -1 : PySequence_Contains(self->token_types, dtype);
    Py_XDECREF(dtype);
    if (found < 1) return found;
    long long count = read_integer(given, text_numel, 1, NULL);
    if (count < 0) return -1;
    timeline->input_tokens += count;
    return 0;
}

static int count_inputs(Hooks *self, Timeline *timeline, PyObject *module, PyObject *args,
                        PyObject *kwargs) {
    PyObject *given = PyTuple_Size(args) ? PyTuple_GetItem(args, 0)
                                         : PyDict_GetItemWithError(kwargs, text_input_ids);
    if (given == NULL && PyErr_Occurred()) return -1;
    given = Py_NewRef(given == NULL ? Py_None : given);
    int failed;
    if ((PyObject *)Py_TYPE(given) == self->tensor) {
        failed = count_tensor(self, timeline, module, given) < 0;
    } else {
        PyObject *result = PyObject_CallMethodObjArgs((PyObject *)self, text__count_batch, module,
                                                      given, kwargs, NULL);
        failed = result == NULL;
        Py_XDECREF(result);
    }
    Py_DECREF(given);
    return failed ? -1 : 0;
}

/* Whether the model is told the tokens of the whole step. */
static int note_normalization(Hooks *self, PyObject *kwargs) {
    PyObject *given = PyDict_GetItemWithError(kwargs, text_num_items_in_batch);
    if (given == NULL && PyErr_Occurred()) return -1;
    self->is_normalized = given != NULL && given != Py_None;
    return 0;
}

static PyObject *hooks_forward_begins(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    int is_usual = nargs == 3 && PyTuple_Check(args[1]) && PyDict_Check(args[2]) &&
                   is_complete(self) && self->tensor != NULL && self->token_types != NULL;
    if (is_usual) is_usual = is_training_forward(self, args[0]);
    if (is_usual < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
        PyErr_Clear(); /* the twin meets it again, and hands it to the guard */
    }
    if (is_usual < 1 || !can_have_step(self) || !is_free(self->timeline, FORWARD)) {
        return call_method(object, text_plain_forward_begins, args, nargs);
    }
    long long now_ns;
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "forward begin");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    self->forward_depth = self->num_forwards = 1;
    PyObject *before = self->forward_module;
    self->forward_module = Py_NewRef(args[0]);
    self->forward_phase = phase_ids[FORWARD];
    if (!timeline->step_start_ns) {
        Steps *steps = self->steps;
        timeline->step_start_ns = steps->batch_start_ns && steps->has_fetched ? steps->batch_start_ns
                                                                             : now_ns;
        if (steps->has_fetched) {
            PyObject *ended = steps->ended_optimizers;
            steps->ended_optimizers = Py_NewRef(empty_tuple);
            steps->has_fetched = 0;
            steps->batch_start_ns = 0;
            Py_XDECREF(ended);
        }
    }
    int failed = begin_phase(timeline, FORWARD, now_ns) < 0 ||
                 count_inputs(self, timeline, args[0], args[1], args[2]) < 0 ||
                 note_normalization(self, args[2]) < 0 || add_own_time(self, timeline, now_ns) < 0;
    Py_DECREF(timeline);
    PyObject *result = failed ? hand_to_guard(self, "forward begin") : Py_NewRef(Py_None);
    Py_XDECREF(before);
    return result;
}

static int is_signal_due(Hooks *self, long long now_ns) {
    return now_ns >= self->next_signals_ns || self->timeline->step >= self->next_signals_step;
}

/* In a step whose numbers are taken the model may name its loss. */
static int see_output(Hooks *self, long long now_ns, PyObject *output) {
    if (!(self->takes_signals || is_signal_due(self, now_ns)) || self->losses == NULL) return 0;
    PyObject *losses = Py_NewRef(self->losses);
    PyObject *result = PyObject_CallMethodObjArgs(losses, text_see_output, output, NULL);
    Py_DECREF(losses);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *hooks_forward_ends(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    long long now_ns;
    if (nargs != 3 || !is_complete(self) || self->timeline->open_phase != FORWARD ||
        self->forward_module != args[0]) {
        return call_method(object, text_plain_forward_ends, args, nargs);
    }
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "forward end");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    PyObject *before = self->forward_module;
    self->forward_depth = 0;
    self->forward_module = Py_NewRef(Py_None);
    int failed = end_phase(timeline, FORWARD, now_ns) < 0 ||
                 see_output(self, now_ns, args[2]) < 0 || add_own_time(self, timeline, now_ns) < 0;
    Py_DECREF(timeline);
    PyObject *result = failed ? hand_to_guard(self, "forward end") : Py_NewRef(Py_None);
    Py_XDECREF(before);
    return result;
}

static int append(PyObject *deque, PyObject *number) {
    if (number == NULL) return -1;
    PyObject *result = PyObject_CallMethodObjArgs(deque, text_append, number, NULL);
    Py_DECREF(number);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* As `_remember` does. */
static int remember(Hooks *self, PyObject *loss, PyObject *kept) {
    if (self->older == NULL) return 0;
    PyObject *is_cpu = PyObject_GetAttr(loss, text_is_cpu);
    if (is_cpu == NULL) return -1;
    Py_DECREF(is_cpu);
    if (is_cpu != Py_True) return 0;
    PyObject *older = Py_NewRef(self->older);
    PyObject *value = PyObject_CallMethodObjArgs(kept, text_item, NULL);
    int failed = value == NULL || append(older, PyLong_FromLongLong(self->timeline->step)) < 0 ||
                 append(older, Py_NewRef(value)) < 0;
    Py_XDECREF(value);
    Py_DECREF(older);
    return failed ? -1 : 0;
}

/* The loss of a step whose numbers are not taken, in case it is the last one. */
static int keep_loss(Hooks *self, PyObject *loss) {
    PyObject *list = PyList_New(0), *kept = NULL, *before = self->previous;
    if (list == NULL) return -1;
    self->previous = self->recent;
    self->recent = list;
    Py_XDECREF(before);
    if ((PyObject *)Py_TYPE(loss) != self->tensor) return 0;
    PyObject *numel = PyObject_CallMethodObjArgs(loss, text_numel, NULL);
    long long count = numel == NULL ? -1 : PyLong_AsLongLong(numel);
    Py_XDECREF(numel);
    if (count == -1 && PyErr_Occurred()) return -1;
    if (count != 1) return 0;
    kept = self->unscaled == NULL || self->unscaled == Py_None
               ? PyObject_CallMethodObjArgs(loss, text_detach, NULL)
               : Py_NewRef(self->unscaled);
    int failed = kept == NULL || self->recent == NULL || !PyList_Check(self->recent) ||
                 PyList_Append(self->recent, kept) < 0 || remember(self, loss, kept) < 0;
    Py_XDECREF(kept);
    return failed ? -1 : 0;
}

/* As `_take_loss` does, which is called for what is not said of every step. */
static int take_loss(Hooks *self, Timeline *timeline, long long now_ns, PyObject *args,
                     PyObject *kwargs) {
    PyObject *loss = PyTuple_Size(args) ? PyTuple_GetItem(args, 0)
                                        : PyDict_GetItemWithError(kwargs, text_tensors);
    if (loss == NULL && PyErr_Occurred()) return -1;
    loss = Py_NewRef(loss == NULL ? Py_None : loss);
    int failed;
    if (self->loss_step == timeline->step || is_signal_due(self, now_ns) || self->is_gradient ||
        self->steps->has_several || (PyObject *)Py_TYPE(loss) != self->tensor) {
        PyObject *result = PyObject_CallMethod((PyObject *)self, "_take_loss", "LO", now_ns, loss);
        failed = result == NULL;
        Py_XDECREF(result);
    } else {
        self->loss_step = timeline->step;
        self->takes_signals = 0;
        failed = keep_loss(self, loss) < 0;
        if (!failed) {
            PyObject *before = self->unscaled;
            self->unscaled = Py_NewRef(Py_None);
            Py_XDECREF(before);
        }
    }
    Py_DECREF(loss);
    return failed ? -1 : 0;
}

/* Whether a backward leaves its graph to another one: what is said there is written in Python. */
static int keeps_graph(PyObject *args, PyObject *kwargs) {
    Py_ssize_t size = PyTuple_Size(args);
    if (size > 2 && PyTuple_GetItem(args, 2) == Py_True) return 1;
    if (size > 3 && PyTuple_GetItem(args, 3) == Py_True) return 1;
    return size < 4 && PyDict_Size(kwargs) > 1; /* Tensor.backward gives `inputs` alone by name */
}

static PyObject *hooks_backward_begins(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    long long now_ns;
    if (nargs != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1]) || !is_complete(self) ||
        self->backward_depth || !self->num_forwards || !self->timeline->step_start_ns ||
        !is_free(self->timeline, BACKWARD) || keeps_graph(args[0], args[1])) {
        return call_method(object, text_plain_backward_begins, args, nargs);
    }
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "backward begin");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    self->backward_depth = 1;
    int failed = begin_phase(timeline, BACKWARD, now_ns) < 0 ||
                 take_loss(self, timeline, now_ns, args[0], args[1]) < 0 ||
                 add_own_time(self, timeline, now_ns) < 0;
    Py_DECREF(timeline);
    return failed ? hand_to_guard(self, "backward begin") : Py_NewRef(Py_None);
}

static int end_pass(Hooks *self) {
    PyObject *on_pass_end = self->on_pass_end;
    if (on_pass_end == NULL || on_pass_end == Py_None) return 0;
    Py_INCREF(on_pass_end);
    PyObject *result = PyObject_CallNoArgs(on_pass_end);
    Py_DECREF(on_pass_end);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *hooks_backward_ends(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    long long now_ns;
    if (nargs != 1 || !is_complete(self) || self->backward_depth != 1 ||
        self->timeline->open_phase != BACKWARD || self->ends_after_backward == NULL ||
        PyObject_IsTrue(self->ends_after_backward)) {
        return call_method(object, text_plain_backward_ends, args, nargs);
    }
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "backward end");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    self->backward_depth = 0;
    int failed = end_phase(timeline, BACKWARD, now_ns) < 0 || end_pass(self) < 0;
    if (!failed) {
        timeline->microbatch += timeline->microbatch_stride;
        self->num_forwards = 0;
        self->was_eval_with_grad = 0;
        failed = add_own_time(self, timeline, now_ns) < 0;
    }
    Py_DECREF(timeline);
    return failed ? hand_to_guard(self, "backward end") : Py_NewRef(Py_None);
}

static PyObject *hooks_optimizer_begins(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    long long now_ns;
    if (nargs != 3 || !is_complete(self) || self->open_optimizer || self->backward_depth ||
        self->steps->has_several || !self->timeline->step_start_ns ||
        !is_free(self->timeline, OPTIMIZER)) {
        return call_method(object, text_plain_optimizer_begins, args, nargs);
    }
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "optimizer begin");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    self->open_optimizer = (long long)(intptr_t)args[0];
    self->optimizer_depth = 1;
    self->optimizer_microbatch = timeline->microbatch;
    int failed =
        begin_phase(timeline, OPTIMIZER, now_ns) < 0 || add_own_time(self, timeline, now_ns) < 0;
    Py_DECREF(timeline);
    return failed ? hand_to_guard(self, "optimizer begin") : Py_NewRef(Py_None);
}

/* The rate of a step whose numbers are not taken, in case it is the last one. */
static int keep_rate(Hooks *self, PyObject *optimizer) {
    PyObject *rate = NULL, *groups = PyObject_GetAttr(optimizer, text_param_groups);
    PyObject *group = groups == NULL ? NULL : PySequence_GetItem(groups, 0);
    Py_XDECREF(groups);
    if (group == NULL) return -1;
    if (PyDict_Check(group)) rate = PyDict_GetItemWithError(group, text_lr);
    int failed = rate == NULL && PyErr_Occurred() != NULL;
    if (!failed) {
        PyObject *before = self->rate;
        self->rate = Py_NewRef(rate == NULL ? Py_None : rate);
        Py_XDECREF(before);
    }
    Py_DECREF(group);
    return failed ? -1 : 0;
}

static PyObject *hooks_optimizer_ends(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Hooks *self = (Hooks *)object;
    long long now_ns;
    if (nargs != 3 || !is_complete(self) ||
        self->open_optimizer != (long long)(intptr_t)args[0] || self->optimizer_depth != 1 ||
        self->takes_signals || self->backward_depth || self->steps->has_several ||
        self->steps->is_explicit || self->timeline->open_phase != OPTIMIZER ||
        !can_end_step(self->timeline)) {
        return call_method(object, text_plain_optimizer_ends, args, nargs);
    }
    if (read_clock(self->clock, &now_ns) < 0) return hand_to_guard(self, "optimizer end");
    Timeline *timeline = (Timeline *)Py_NewRef((PyObject *)self->timeline);
    self->optimizer_depth = 0;
    self->open_optimizer = 0;
    int failed = end_phase(timeline, OPTIMIZER, now_ns) < 0;
    if (!failed) {
        self->loss_step = -1; /* as `_settle` does where no numbers are taken */
        failed = keep_rate(self, args[0]) < 0;
    }
    if (!failed) {
        self->steps->num_updates += 1;
        failed = end_step(timeline, now_ns, 0) < 0;
    }
    Py_DECREF(timeline);
    return failed ? hand_to_guard(self, "optimizer end") : Py_NewRef(Py_None);
}

/* --- module ------------------------------------------------------------------------------------- */

#define METHOD(name, function) \
    {"native_" name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef timeline_methods[] = {
    METHOD("enter", timeline_enter),
    METHOD("leave", timeline_leave),
    METHOD("end_step", timeline_end_step),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef hooks_methods[] = {
    METHOD("forward_begins", hooks_forward_begins),
    METHOD("forward_ends", hooks_forward_ends),
    METHOD("backward_begins", hooks_backward_begins),
    METHOD("backward_ends", hooks_backward_ends),
    METHOD("optimizer_begins", hooks_optimizer_begins),
    METHOD("optimizer_ends", hooks_optimizer_ends),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef no_methods[] = {{NULL, NULL, 0, NULL}};
static PyGetSetDef no_getset[] = {{NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject *make_type(PyObject *module, const char *name, int size, destructor dealloc,
                               traverseproc traverse, inquiry clear, PyMemberDef *members,
                               PyGetSetDef *getset, PyMethodDef *methods) {
    PyType_Slot slots[] = {
        {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse},
        {Py_tp_clear, clear},           {Py_tp_members, members}, {Py_tp_getset, getset},
        {Py_tp_methods, methods},       {0, NULL},
    };
    PyType_Spec spec = {
        .name = name,
        .basicsize = size,
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
                 Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (type != NULL && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

/* The name ids of the usual phases, in the order of `PHASE_ORDER`. */
static PyObject *set_phase_ids(PyObject *module, PyObject *args) {
    (void)module;
    if (!PyArg_ParseTuple(args, "LLLL", &phase_ids[0], &phase_ids[1], &phase_ids[2],
                          &phase_ids[3])) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_phase_ids", set_phase_ids, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_hot_steps_native",
    .m_doc = "The usual way through a step's callbacks.",
    .m_size = -1,
    .m_methods = module_methods,
};

static int prepare(PyObject *module) {
#define MAKE(name, text, type, getset, methods)                                                 \
    make_type(module, "meshscope.capture.steps._hot_steps_native." text, sizeof(type),          \
              name##_dealloc, name##_traverse, name##_clear, name##_members, getset, methods)
    slots_api = PyCapsule_Import(RECORD_SLOTS_CAPSULE, 0);
    if (slots_api == NULL) return -1;
    stack_type = MAKE(stack, "PhaseStack", Stack, no_getset, no_methods);
    timeline_type = MAKE(timeline, "Timeline", Timeline, timeline_getset, timeline_methods);
    steps_type = MAKE(steps, "StepInference", Steps, no_getset, no_methods);
    hooks_type = MAKE(hooks, "Hooks", Hooks, hooks_getset, hooks_methods);
    if (!stack_type || !timeline_type || !steps_type || !hooks_type) return -1;
    PyObject *time_module = PyImport_ImportModule("time");
    if (time_module == NULL) return -1;
    monotonic_ns = PyObject_GetAttrString(time_module, "monotonic_ns");
    Py_DECREF(time_module);
#define INTERN(name) \
    if ((text_##name = PyUnicode_InternFromString(#name)) == NULL) return -1;
    NAMES(INTERN)
    empty_tuple = PyTuple_New(0);
    zero = PyLong_FromLong(0);
    if (!monotonic_ns || !empty_tuple || !zero) return -1;
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

PyMODINIT_FUNC PyInit__hot_steps_native(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && prepare(module) < 0) Py_CLEAR(module);
    return module;
}
