/* What record_slots.c offers to other compiled parts, as the capsule RECORD_SLOTS_CAPSULE. */

#ifndef MESHSCOPE_RECORD_SLOTS_H
#define MESHSCOPE_RECORD_SLOTS_H

#include <Python.h>
#include <stdint.h>

#define RECORD_SLOTS_CAPSULE "meshscope.store.write._record_slots_native.C_API"
#define NUM_WORDS 7

typedef struct {
    PyTypeObject *type;
    /* The function behind `RecordSlots.put`: its presence in a bound method tells whose it is. */
    PyCFunction put;
    /* Whether the record is written; 0 where the next slot is not in the window. Raises nothing. */
    int (*write)(PyObject *slots, const int64_t words[NUM_WORDS]);
} RecordSlotsApi;

#endif
