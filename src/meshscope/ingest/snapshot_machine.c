/* Reads a memory snapshot's pickle into columns, a buffer at a time.
 *
 * No Python in here: plain C99, loaded with ctypes where it could be compiled. `snapshot_pickle.py`
 * does the same without it, and tests hold the two against each other.
 *
 * A pickle is a program for a stack machine. This one knows plain values only: what would import,
 * call or build anything is an error, and there is no code for it. Values are words of 64 bits, a
 * tag and a number: a dict becomes a row (or a frame) when it is filled, a list of frames a stack,
 * so there are no objects, nothing is counted or recursed into, and the worst a wrong reference can
 * do is name another row. Every length is checked against the buffer, every reference against the
 * memo, and the memo and the stack are bounded by the file's size.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t Word;

enum {
    OPAQUE, /* a value nobody asks for: None, float, tuple, a number that does not fit */
    INT,
    TEXT,  /* symbol */
    DICT,  /* empty, or of no known kind; its place in the memo + 1, or 0 */
    LIST,  /* with nothing of interest so far; its place in the memo + 1, or 0 */
    FRAME, /* number */
    EVENT, /* row; also the next two */
    BLOCK,
    SEGMENT,
    HISTORY, /* stack of an entry in a block's history, before torch 2.1 */
    STACK,   /* number, of a list of frames */
    TRACE,   /* number, of a list of events */
    BLOCKS,  /* number, of a list of blocks */
    LISTS    /* number, of a list of lists */
};
#define ABSENT ((Word)-1)
#define TAG(word) ((int)((word) & 15))
#define NUMBER(word) ((word) >> 4)

enum { RUNNING, DONE, BROKEN };
enum {
    ERROR_NONE,
    ERROR_RUNS_CODE,
    ERROR_UNKNOWN,
    ERROR_PROTOCOL,
    ERROR_LONG_TEXT,
    ERROR_LONG_NUMBER,
    ERROR_INVALID,
    ERROR_ORDER,
    ERROR_TOO_MANY,
    ERROR_MEMORY
};

/* The first symbols, in the order of KEYS, STATES and ACTIONS in snapshot_words.py. */
enum {
    KEY_ACTION,
    KEY_ADDR,
    KEY_DEVICE_FREE,
    KEY_SIZE,
    KEY_TIME,
    KEY_FRAMES,
    KEY_STATE,
    KEY_REQUESTED,
    KEY_ADDRESS,
    KEY_BLOCKS,
    KEY_TOTAL,
    KEY_DEVICE,
    KEY_SEGMENT_TYPE,
    KEY_NAME,
    KEY_FILENAME,
    KEY_LINE,
    KEY_HISTORY,
    KEY_SEGMENTS,
    KEY_TRACES,
    NUM_KEYS,
    TEXT_EMPTY = NUM_KEYS,
    TEXT_LARGE,
    FIRST_STATE
};

#define MAX_TEXT_BYTES (1 << 26)
#define MAX_KEPT_TEXT_BYTES (1 << 16)
#define MAX_NUMBER_BYTES 64
#define MAX_NUMBER ((int64_t)1 << 59)
#define MAX_FRAMES 512
#define MAX_MARKS (1 << 16)
#define MAX_TRACES (1 << 15)

typedef struct {
    void *data;
    int64_t num, room;
    int64_t width;
} Column;

typedef struct {
    int32_t *slot; /* number + 1, 0: empty */
    int64_t num_slots;
} Table;

enum { EVENT_DEVICE, EVENT_ACTION, EVENT_ADDRESS, EVENT_BYTES, EVENT_TIME, EVENT_STACK, EVENT_COLUMNS };
enum { BLOCK_SEGMENT, BLOCK_ADDRESS, BLOCK_BYTES, BLOCK_REQUESTED, BLOCK_STATE, BLOCK_STACK, BLOCK_COLUMNS };
enum { SEGMENT_DEVICE, SEGMENT_ADDRESS, SEGMENT_TOTAL, SEGMENT_LARGE, SEGMENT_COLUMNS };

typedef struct {
    int state, error;
    int64_t error_value;
    int64_t needed; /* bytes the next instruction has */
    int64_t num_odd;
    int64_t has_root;
    int64_t num_states, num_actions;
    int64_t max_memo, max_stack;
    uint64_t seed[2];
    Column stack, memo, marks;
    Column events[EVENT_COLUMNS], blocks[BLOCK_COLUMNS], segments[SEGMENT_COLUMNS];
    Column text_begin, arena;
    Column frame_name, frame_file, frame_line;
    Column stack_begin, stack_frames;
    Column trace_device, blocks_segment, lists_length;
    Table texts, frames, stacks;
} Machine;

/* ---- memory ----------------------------------------------------------------------------- */

static int grow(Column *column, int64_t num) {
    if (num <= column->room) return 1;
    int64_t room = column->room + column->room / 2;
    if (room < num) room = num;
    if (room < 256) room = 256;
    void *data = realloc(column->data, (size_t)room * (size_t)column->width);
    if (!data) return 0;
    column->data = data;
    column->room = room;
    return 1;
}

static inline int push64(Column *column, int64_t value) {
    if (column->num == column->room && !grow(column, column->num + 1)) return 0;
    ((int64_t *)column->data)[column->num++] = value;
    return 1;
}

static inline int push32(Column *column, int32_t value) {
    if (column->num == column->room && !grow(column, column->num + 1)) return 0;
    ((int32_t *)column->data)[column->num++] = value;
    return 1;
}

static inline int push16(Column *column, int16_t value) {
    if (column->num == column->room && !grow(column, column->num + 1)) return 0;
    ((int16_t *)column->data)[column->num++] = value;
    return 1;
}

static inline int push8(Column *column, int8_t value) {
    if (column->num == column->room && !grow(column, column->num + 1)) return 0;
    ((int8_t *)column->data)[column->num++] = value;
    return 1;
}

#define WORDS(column) ((Word *)(column).data)
#define INTS64(column) ((int64_t *)(column).data)
#define INTS32(column) ((int32_t *)(column).data)
#define INTS16(column) ((int16_t *)(column).data)

static void drop(Column *column) {
    free(column->data);
    column->data = NULL;
    column->num = column->room = 0;
}

static int fail(Machine *m, int error, int64_t value) {
    m->state = BROKEN;
    m->error = error;
    m->error_value = value;
    return 0;
}

static inline Word make(int tag, int64_t number) { return (Word)((uint64_t)number << 4 | (uint64_t)tag); }

/* ---- tables: SipHash-1-3, with a key of this process, so that no file can make them slow ------- */

#define ROTATE(x, b) ((x) << (b) | (x) >> (64 - (b)))
#define ROUND                                                                             \
    do {                                                                                  \
        v0 += v1; v1 = ROTATE(v1, 13); v1 ^= v0; v0 = ROTATE(v0, 32);                     \
        v2 += v3; v3 = ROTATE(v3, 16); v3 ^= v2;                                          \
        v0 += v3; v3 = ROTATE(v3, 21); v3 ^= v0;                                          \
        v2 += v1; v1 = ROTATE(v1, 17); v1 ^= v2; v2 = ROTATE(v2, 32);                     \
    } while (0)

static uint64_t hash_bytes(const Machine *m, const void *data, int64_t size) {
    const uint8_t *p = data;
    uint64_t v0 = m->seed[0] ^ 0x736f6d6570736575u, v1 = m->seed[1] ^ 0x646f72616e646f6du;
    uint64_t v2 = m->seed[0] ^ 0x6c7967656e657261u, v3 = m->seed[1] ^ 0x7465646279746573u;
    uint64_t last = (uint64_t)size << 56;
    int64_t place = 0;
    for (; place + 8 <= size; place += 8) {
        uint64_t word;
        memcpy(&word, p + place, 8);
        v3 ^= word;
        ROUND;
        v0 ^= word;
    }
    for (int i = 0; i < (int)(size & 7); i++) last |= (uint64_t)p[place + i] << (8 * i);
    v3 ^= last;
    ROUND;
    v0 ^= last;
    v2 ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    return v0 ^ v1 ^ v2 ^ v3;
}

static inline const char *text_at(const Machine *m, int64_t number, int64_t *size) {
    int64_t begin = INTS64(m->text_begin)[number];
    *size = INTS64(m->text_begin)[number + 1] - begin;
    return (const char *)m->arena.data + begin;
}

typedef uint64_t (*HashOf)(const Machine *, int64_t number);

static uint64_t hash_text(const Machine *m, int64_t number) {
    int64_t size;
    const char *text = text_at(m, number, &size);
    return hash_bytes(m, text, size);
}

static uint64_t hash_frame(const Machine *m, int64_t number) {
    int64_t key[3] = {INTS32(m->frame_name)[number], INTS32(m->frame_file)[number],
                      INTS64(m->frame_line)[number]};
    return hash_bytes(m, key, sizeof key);
}

static uint64_t hash_stack(const Machine *m, int64_t number) {
    int64_t begin = INTS64(m->stack_begin)[number], end = INTS64(m->stack_begin)[number + 1];
    return hash_bytes(m, INTS32(m->stack_frames) + begin, (end - begin) * 4);
}

/* Room for one more of `num`. */
static int make_room(Machine *m, Table *table, int64_t num, HashOf hash_of) {
    if (2 * (num + 1) <= table->num_slots) return 1;
    if (num >= INT32_MAX / 2) return 0;
    int64_t num_slots = table->num_slots ? 2 * table->num_slots : 1024;
    int32_t *slot = calloc((size_t)num_slots, sizeof *slot);
    if (!slot) return 0;
    for (int64_t number = 0; number < num; number++) {
        uint64_t place = hash_of(m, number) & (uint64_t)(num_slots - 1);
        while (slot[place]) place = (place + 1) & (uint64_t)(num_slots - 1);
        slot[place] = (int32_t)number + 1;
    }
    free(table->slot);
    table->slot = slot;
    table->num_slots = num_slots;
    return 1;
}

/* Number of a text; -1 without memory. */
static int64_t intern_text(Machine *m, const char *text, int64_t size) {
    int64_t num = m->text_begin.num - 1;
    if (!make_room(m, &m->texts, num, hash_text)) return -1;
    uint64_t mask = (uint64_t)(m->texts.num_slots - 1);
    uint64_t place = hash_bytes(m, text, size) & mask;
    for (; m->texts.slot[place]; place = (place + 1) & mask) {
        int64_t number = m->texts.slot[place] - 1, length;
        const char *known = text_at(m, number, &length);
        if (length == size && (!size || !memcmp(known, text, (size_t)size))) return number;
    }
    if (!grow(&m->arena, m->arena.num + size)) return -1;
    if (size) memcpy((char *)m->arena.data + m->arena.num, text, (size_t)size);
    if (!push64(&m->text_begin, m->arena.num + size)) return -1;
    m->arena.num += size;
    m->texts.slot[place] = (int32_t)num + 1;
    return num;
}

static int64_t intern_frame(Machine *m, int32_t name, int32_t file, int64_t line) {
    int64_t num = m->frame_name.num;
    if (!make_room(m, &m->frames, num, hash_frame)) return -1;
    uint64_t mask = (uint64_t)(m->frames.num_slots - 1);
    int64_t key[3] = {name, file, line};
    uint64_t place = hash_bytes(m, key, sizeof key) & mask;
    for (; m->frames.slot[place]; place = (place + 1) & mask) {
        int64_t number = m->frames.slot[place] - 1;
        if (INTS32(m->frame_name)[number] == name && INTS32(m->frame_file)[number] == file &&
            INTS64(m->frame_line)[number] == line)
            return number;
    }
    if (!push32(&m->frame_name, name) || !push32(&m->frame_file, file) ||
        !push64(&m->frame_line, line))
        return -1;
    m->frames.slot[place] = (int32_t)num + 1;
    return num;
}

static int64_t intern_stack(Machine *m, const int32_t *frames, int64_t num_frames) {
    int64_t num = m->stack_begin.num - 1;
    if (!make_room(m, &m->stacks, num, hash_stack)) return -1;
    uint64_t mask = (uint64_t)(m->stacks.num_slots - 1);
    uint64_t place = hash_bytes(m, frames, num_frames * 4) & mask;
    const int64_t *begin = INTS64(m->stack_begin);
    for (; m->stacks.slot[place]; place = (place + 1) & mask) {
        int64_t number = m->stacks.slot[place] - 1;
        if (begin[number + 1] - begin[number] == num_frames &&
            (!num_frames || !memcmp(INTS32(m->stack_frames) + begin[number], frames, (size_t)num_frames * 4)))
            return number;
    }
    int64_t end = m->stack_frames.num + num_frames;
    if (!grow(&m->stack_frames, end) || !push64(&m->stack_begin, end)) return -1;
    if (num_frames)
        memcpy(INTS32(m->stack_frames) + m->stack_frames.num, frames, (size_t)num_frames * 4);
    m->stack_frames.num = end;
    m->stacks.slot[place] = (int32_t)num + 1;
    return num;
}

/* ---- entries ----------------------------------------------------------------------------- */

static inline int64_t positive(Word word) {
    return TAG(word) == INT && NUMBER(word) >= 0 ? NUMBER(word) : -1;
}

static inline int32_t text_or_empty(Word word) {
    return TAG(word) == TEXT ? (int32_t)NUMBER(word) : TEXT_EMPTY;
}

static inline int64_t place_among(Word word, int64_t first, int64_t num) {
    if (TAG(word) != TEXT) return -1;
    int64_t place = NUMBER(word) - first;
    return place >= 0 && place < num ? place : -1;
}

static inline int64_t stack_of(const Word *fields) {
    if (TAG(fields[KEY_FRAMES]) == STACK) return NUMBER(fields[KEY_FRAMES]);
    return TAG(fields[KEY_HISTORY]) == STACK ? NUMBER(fields[KEY_HISTORY]) : 0;
}

static Word add_event(Machine *m, const Word *fields) {
    Column *c = m->events;
    int64_t row = c[EVENT_STACK].num;
    int64_t action = place_among(fields[KEY_ACTION], FIRST_STATE + m->num_states, m->num_actions);
    Word address = fields[KEY_ADDR] == ABSENT ? fields[KEY_DEVICE_FREE] : fields[KEY_ADDR];
    m->num_odd += action < 0;
    if (!push16(&c[EVENT_DEVICE], -1) || !push8(&c[EVENT_ACTION], (int8_t)action) ||
        !push64(&c[EVENT_ADDRESS], positive(address)) ||
        !push64(&c[EVENT_BYTES], positive(fields[KEY_SIZE])) ||
        !push64(&c[EVENT_TIME], positive(fields[KEY_TIME])) ||
        !push32(&c[EVENT_STACK], (int32_t)stack_of(fields)))
        return ABSENT;
    return make(EVENT, row);
}

static Word add_block(Machine *m, const Word *fields) {
    Column *c = m->blocks;
    int64_t row = c[BLOCK_STACK].num, size = positive(fields[KEY_SIZE]);
    m->num_odd += size < 0;
    if (!push64(&c[BLOCK_SEGMENT], -1) || !push64(&c[BLOCK_ADDRESS], positive(fields[KEY_ADDRESS])) ||
        !push64(&c[BLOCK_BYTES], size) ||
        !push64(&c[BLOCK_REQUESTED], positive(fields[KEY_REQUESTED])) ||
        !push64(&c[BLOCK_STATE], place_among(fields[KEY_STATE], FIRST_STATE, m->num_states)) ||
        !push64(&c[BLOCK_STACK], stack_of(fields)))
        return ABSENT;
    return make(BLOCK, row);
}

static Word add_segment(Machine *m, const Word *fields) {
    Column *c = m->segments;
    int64_t row = c[SEGMENT_LARGE].num, device = positive(fields[KEY_DEVICE]);
    Word type = fields[KEY_SEGMENT_TYPE], blocks = fields[KEY_BLOCKS];
    if (!push64(&c[SEGMENT_DEVICE], device < 0 ? 0 : device) ||
        !push64(&c[SEGMENT_ADDRESS], positive(fields[KEY_ADDRESS])) ||
        !push64(&c[SEGMENT_TOTAL], positive(fields[KEY_TOTAL])) ||
        !push64(&c[SEGMENT_LARGE], TAG(type) == TEXT && NUMBER(type) == TEXT_LARGE))
        return ABSENT;
    if (TAG(blocks) == BLOCKS && INTS64(m->blocks_segment)[NUMBER(blocks)] < 0)
        INTS64(m->blocks_segment)[NUMBER(blocks)] = row;
    return make(SEGMENT, row);
}

static Word add_frame(Machine *m, const Word *fields) {
    int64_t line = positive(fields[KEY_LINE]);
    int64_t number = intern_frame(m, text_or_empty(fields[KEY_NAME]),
                                  text_or_empty(fields[KEY_FILENAME]), line < 0 ? 0 : line);
    return number < 0 ? ABSENT : make(FRAME, number);
}

/* What a dict is by its keys; ABSENT without memory. */
static Word take_dict(Machine *m, const Word *fields, Word target) {
#define HAS(key) (fields[key] != ABSENT)
    if (HAS(KEY_ACTION)) return add_event(m, fields);
    if (HAS(KEY_BLOCKS) && HAS(KEY_TOTAL)) return add_segment(m, fields);
    if (HAS(KEY_STATE) && HAS(KEY_SIZE)) return add_block(m, fields);
    if (HAS(KEY_FILENAME)) return add_frame(m, fields);
    if (HAS(KEY_FRAMES)) return make(HISTORY, stack_of(fields));
    if (HAS(KEY_SEGMENTS) || HAS(KEY_TRACES)) m->has_root = 1;
    return target;
#undef HAS
}

/* The container at `place` of the stack became something; a reference to it gives that too. */
static void become(Machine *m, int64_t place, Word now) {
    Word before = WORDS(m->stack)[place];
    int64_t memo = NUMBER(before) - 1;
    WORDS(m->stack)[place] = now;
    if (memo < 0 || memo >= m->memo.num || WORDS(m->memo)[memo] != before) return;
    int is_row = TAG(now) == EVENT || TAG(now) == BLOCK || TAG(now) == SEGMENT;
    WORDS(m->memo)[memo] = is_row ? make(OPAQUE, 0) : now;
}

static int fill_dict(Machine *m, int64_t place, const Word *items, int64_t num) {
    Word target = WORDS(m->stack)[place], fields[NUM_KEYS];
    int tag = TAG(target);
    if (num % 2) return fail(m, ERROR_INVALID, 0);
    if (tag != DICT) {
        if (tag < FRAME || tag > HISTORY) return fail(m, ERROR_INVALID, 0);
        m->num_odd++; /* filled twice: not by pickle */
        return 1;
    }
    for (int key = 0; key < NUM_KEYS; key++) fields[key] = ABSENT;
    for (int64_t i = 0; i < num; i += 2)
        if (TAG(items[i]) == TEXT && NUMBER(items[i]) < NUM_KEYS) fields[NUMBER(items[i])] = items[i + 1];
    Word now = take_dict(m, fields, target);
    if (now == ABSENT) return fail(m, ERROR_MEMORY, 0);
    if (now != target) become(m, place, now);
    return 1;
}

static inline int is_list(int tag) { return tag == LIST || tag >= STACK; }

static Word make_stack(Machine *m, const Word *items, int64_t num) {
    int32_t frames[MAX_FRAMES];
    int64_t num_frames = 0;
    for (int64_t i = 0; i < num; i++) {
        if (TAG(items[i]) != FRAME)
            m->num_odd++;
        else if (num_frames < MAX_FRAMES)
            frames[num_frames++] = (int32_t)NUMBER(items[i]);
    }
    int64_t number = intern_stack(m, frames, num_frames);
    return number < 0 ? ABSENT : make(STACK, number);
}

/* What a list is by the first of its elements that is of a known kind. */
static Word take_list(Machine *m, const Word *items, int64_t num, Word target) {
    int64_t i = 0;
    while (i < num && TAG(items[i]) < LIST) i++;
    if (i == num) return target;
    int tag = TAG(items[i]);
    if (tag == FRAME) return make_stack(m, items, num);
    if (tag == HISTORY) return make(STACK, NUMBER(items[i]));
    if (tag == EVENT) {
        if (m->trace_device.num >= MAX_TRACES) {
            fail(m, ERROR_TOO_MANY, 0);
            return ABSENT;
        }
        return push64(&m->trace_device, -1) ? make(TRACE, m->trace_device.num - 1) : ABSENT;
    }
    if (tag == BLOCK)
        return push64(&m->blocks_segment, -1) ? make(BLOCKS, m->blocks_segment.num - 1) : ABSENT;
    if (is_list(tag))
        return push64(&m->lists_length, 0) ? make(LISTS, m->lists_length.num - 1) : ABSENT;
    return target;
}

static void add_to_list(Machine *m, Word target, const Word *items, int64_t num) {
    int64_t number = NUMBER(target);
    for (int64_t i = 0; i < num; i++) {
        int tag = TAG(items[i]);
        int64_t row = NUMBER(items[i]);
        if (TAG(target) == TRACE && tag == EVENT) {
            int16_t *trace = INTS16(m->events[EVENT_DEVICE]) + row;
            if (*trace < 0) *trace = (int16_t)number;
            else m->num_odd++;
        } else if (TAG(target) == BLOCKS && tag == BLOCK) {
            int64_t *list = INTS64(m->blocks[BLOCK_SEGMENT]) + row;
            if (*list < 0) *list = number;
            else m->num_odd++;
        } else if (TAG(target) == LISTS) {
            int64_t device = INTS64(m->lists_length)[number]++;
            if (tag == TRACE && INTS64(m->trace_device)[row] < 0 && device < MAX_TRACES)
                INTS64(m->trace_device)[row] = device;
        } else if (TAG(target) != LIST) {
            m->num_odd++;
        }
    }
}

static int fill_list(Machine *m, int64_t place, const Word *items, int64_t num) {
    Word target = WORDS(m->stack)[place];
    if (!is_list(TAG(target))) return fail(m, ERROR_INVALID, 0);
    if (TAG(target) == STACK) return 1; /* pickle fills by the thousand: more than MAX_FRAMES are there */
    if (TAG(target) == LIST) {
        Word now = take_list(m, items, num, target);
        if (now == ABSENT) return m->state == BROKEN ? 0 : fail(m, ERROR_MEMORY, 0);
        if (now == target) return 1;
        become(m, place, now);
        target = now;
        if (TAG(now) == STACK) return 1;
    }
    add_to_list(m, target, items, num);
    return 1;
}

/* ---- instructions -------------------------------------------------------------------------- */

static inline int push(Machine *m, Word word) {
    if (m->stack.num >= m->max_stack) return fail(m, ERROR_TOO_MANY, 0);
    return push64(&m->stack, word) ? 1 : fail(m, ERROR_MEMORY, 0);
}

static int put(Machine *m, int64_t place) {
    if (!m->stack.num) return fail(m, ERROR_INVALID, 0);
    if (place > m->memo.num) return fail(m, ERROR_ORDER, 0);
    if (place >= m->max_memo) return fail(m, ERROR_TOO_MANY, 0);
    Word *top = WORDS(m->stack) + m->stack.num - 1;
    if (TAG(*top) == DICT || TAG(*top) == LIST) *top = make(TAG(*top), place + 1);
    if (place < m->memo.num) {
        WORDS(m->memo)[place] = *top;
        return 1;
    }
    return push64(&m->memo, *top) ? 1 : fail(m, ERROR_MEMORY, 0);
}

static inline int get(Machine *m, int64_t place) {
    if (place >= m->memo.num) return fail(m, ERROR_INVALID, 0);
    return push(m, WORDS(m->memo)[place]);
}

/* Where the last mark is, which is taken away; -1 without one. */
static int64_t pop_mark(Machine *m) {
    if (!m->marks.num) {
        fail(m, ERROR_INVALID, 0);
        return -1;
    }
    int64_t mark = INTS64(m->marks)[--m->marks.num];
    if (mark > m->stack.num) {
        fail(m, ERROR_INVALID, 0);
        return -1;
    }
    return mark;
}

/* Fills the container below the mark; a mark at the very bottom has none. */
static int fill_from_mark(Machine *m, int (*fill)(Machine *, int64_t, const Word *, int64_t)) {
    int64_t mark = pop_mark(m);
    if (mark < 0) return 0;
    if (mark == 0) return fail(m, ERROR_INVALID, 0);
    if (!fill(m, mark - 1, WORDS(m->stack) + mark, m->stack.num - mark)) return 0;
    m->stack.num = mark;
    return 1;
}

static int fill_with(Machine *m, int64_t num, int (*fill)(Machine *, int64_t, const Word *, int64_t)) {
    if (m->stack.num < num + 1) return fail(m, ERROR_INVALID, 0);
    int64_t first = m->stack.num - num;
    if (!fill(m, first - 1, WORDS(m->stack) + first, num)) return 0;
    m->stack.num = first;
    return 1;
}

/* A container made of what follows the mark. */
static int make_from_mark(Machine *m, int tag, int (*fill)(Machine *, int64_t, const Word *, int64_t)) {
    int64_t mark = pop_mark(m);
    if (mark < 0) return 0;
    if (tag == OPAQUE) {
        m->stack.num = mark;
        return push(m, make(OPAQUE, 0));
    }
    /* One place up, so that the container can stand below its contents. */
    if (!push(m, 0)) return 0;
    Word *base = WORDS(m->stack) + mark;
    memmove(base + 1, base, (size_t)(m->stack.num - 1 - mark) * sizeof *base);
    *base = make(tag, 0);
    if (!fill(m, mark, base + 1, m->stack.num - 1 - mark)) return 0;
    m->stack.num = mark + 1;
    return 1;
}

static int make_tuple(Machine *m, int64_t num) {
    if (m->stack.num < num) return fail(m, ERROR_INVALID, 0);
    m->stack.num -= num;
    return push(m, make(OPAQUE, 0));
}

static inline uint64_t little(const uint8_t *p, int num) {
    uint64_t value = 0;
    for (int i = 0; i < num; i++) value |= (uint64_t)p[i] << (8 * i);
    return value;
}

static inline Word number_word(int64_t value) {
    return value > -MAX_NUMBER && value < MAX_NUMBER ? make(INT, value) : make(OPAQUE, 0);
}

static Word long_word(const uint8_t *p, int64_t num) {
    if (!num) return make(INT, 0);
    uint8_t fill = p[num - 1] & 0x80 ? 0xff : 0;
    uint8_t bytes[8];
    for (int64_t i = 0; i < 8; i++) bytes[i] = i < num ? p[i] : fill;
    for (int64_t i = 8; i < num; i++)
        if (p[i] != fill) return make(OPAQUE, 0);
    uint64_t value = little(bytes, 8);
    if (num > 8 && (bytes[7] & 0x80) != (fill & 0x80)) return make(OPAQUE, 0);
    return number_word((int64_t)value);
}

static int runs_code(uint8_t code) {
    return code && strchr("cRbioPQ\x93\x81\x92\x82\x83\x84", code) != NULL;
}

/* Bytes of the sized value at `p`, whose length has `width` bytes; -1: not all there, or an error. */
static int64_t measure(Machine *m, const uint8_t *p, int64_t left, int width, int64_t max, int error) {
    m->needed = 1 + width;
    if (left < 1 + width) return -1;
    uint64_t length = little(p + 1, width);
    if (length > (uint64_t)max) {
        fail(m, error, length > (uint64_t)INT64_MAX ? INT64_MAX : (int64_t)length);
        return -1;
    }
    m->needed = 1 + width + (int64_t)length;
    return left < m->needed ? -1 : (int64_t)length;
}

static int push_text(Machine *m, const uint8_t *text, int64_t size) {
    if (size > MAX_KEPT_TEXT_BYTES) return push(m, make(OPAQUE, 0));
    int64_t number = intern_text(m, (const char *)text, size);
    return number < 0 ? fail(m, ERROR_MEMORY, 0) : push(m, make(TEXT, number));
}

/* One instruction at `p`: how many bytes it has; 0: not all there (`needed` says how many), or an error. */
static int64_t step(Machine *m, const uint8_t *p, int64_t left) {
    int64_t length, mark;
    int width;
#define NEED(n)                            \
    do {                                   \
        m->needed = (n);                   \
        if (left < m->needed) return 0;    \
    } while (0)
    switch (*p) {
    case 'h': NEED(2); return get(m, p[1]) ? 2 : 0;
    case 'j': NEED(5); return get(m, (int64_t)little(p + 1, 4)) ? 5 : 0;
    case 0x94: return put(m, m->memo.num) ? 1 : 0;
    case 'q': NEED(2); return put(m, p[1]) ? 2 : 0;
    case 'r': NEED(5); return put(m, (int64_t)little(p + 1, 4)) ? 5 : 0;
    case 'K': NEED(2); return push(m, make(INT, p[1])) ? 2 : 0;
    case 'M': NEED(3); return push(m, make(INT, (int64_t)little(p + 1, 2))) ? 3 : 0;
    case 'J': NEED(5); return push(m, make(INT, (int32_t)(uint32_t)little(p + 1, 4))) ? 5 : 0;
    case 0x8a: case 0x8b:
        width = *p == 0x8a ? 1 : 4;
        length = measure(m, p, left, width, MAX_NUMBER_BYTES, ERROR_LONG_NUMBER);
        if (length < 0) return 0;
        return push(m, long_word(p + 1 + width, length)) ? 1 + width + length : 0;
    case 0x8c: case 'X': case 0x8d:
        width = *p == 0x8c ? 1 : *p == 'X' ? 4 : 8;
        length = measure(m, p, left, width, MAX_TEXT_BYTES, ERROR_LONG_TEXT);
        if (length < 0) return 0;
        return push_text(m, p + 1 + width, length) ? 1 + width + length : 0;
    case 'C': case 'B': case 0x8e:
        width = *p == 'C' ? 1 : *p == 'B' ? 4 : 8;
        length = measure(m, p, left, width, MAX_TEXT_BYTES, ERROR_LONG_TEXT);
        if (length < 0) return 0;
        return push(m, make(OPAQUE, 0)) ? 1 + width + length : 0;
    case '(':
        if (m->marks.num >= MAX_MARKS) return fail(m, ERROR_TOO_MANY, 0);
        return push64(&m->marks, m->stack.num) ? 1 : fail(m, ERROR_MEMORY, 0);
    case '}': return push(m, make(DICT, 0)) ? 1 : 0;
    case ']': return push(m, make(LIST, 0)) ? 1 : 0;
    case 'N': case 0x88: case 0x89: case ')': return push(m, make(OPAQUE, 0)) ? 1 : 0;
    case 'G': NEED(9); return push(m, make(OPAQUE, 0)) ? 9 : 0;
    case 'u': return fill_from_mark(m, fill_dict) ? 1 : 0;
    case 'e': return fill_from_mark(m, fill_list) ? 1 : 0;
    case 's': return fill_with(m, 2, fill_dict) ? 1 : 0;
    case 'a': return fill_with(m, 1, fill_list) ? 1 : 0;
    case 't': return make_from_mark(m, OPAQUE, NULL) ? 1 : 0;
    case 'l': return make_from_mark(m, LIST, fill_list) ? 1 : 0;
    case 'd': return make_from_mark(m, DICT, fill_dict) ? 1 : 0;
    case 0x85: case 0x86: case 0x87: return make_tuple(m, *p - 0x84) ? 1 : 0;
    case '0':
        if (!m->stack.num) return fail(m, ERROR_INVALID, 0);
        m->stack.num--;
        return 1;
    case '1':
        mark = pop_mark(m);
        if (mark < 0) return 0;
        m->stack.num = mark;
        return 1;
    case 0x80:
        NEED(2);
        return p[1] >= 2 && p[1] <= 5 ? 2 : fail(m, ERROR_PROTOCOL, p[1]);
    case 0x95: NEED(9); return 9;
    case '.': m->state = DONE; return 1;
    default: return fail(m, runs_code(*p) ? ERROR_RUNS_CODE : ERROR_UNKNOWN, *p);
    }
#undef NEED
}

/* ---- what Python calls ------------------------------------------------------------------- */

void snapshot_free(Machine *m) {
    if (!m) return;
    Column *columns[] = {&m->stack, &m->memo, &m->marks, &m->text_begin, &m->arena, &m->frame_name,
                         &m->frame_file, &m->frame_line, &m->stack_begin, &m->stack_frames,
                         &m->trace_device, &m->blocks_segment, &m->lists_length};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) drop(columns[i]);
    for (int i = 0; i < EVENT_COLUMNS; i++) drop(&m->events[i]);
    for (int i = 0; i < BLOCK_COLUMNS; i++) drop(&m->blocks[i]);
    for (int i = 0; i < SEGMENT_COLUMNS; i++) drop(&m->segments[i]);
    free(m->texts.slot);
    free(m->frames.slot);
    free(m->stacks.slot);
    free(m);
}

static void set_widths(Machine *m) {
    Column *wide[] = {&m->stack, &m->memo, &m->marks, &m->text_begin, &m->frame_line, &m->stack_begin,
                      &m->trace_device, &m->blocks_segment, &m->lists_length};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) wide[i]->width = 8;
    for (int i = 0; i < EVENT_COLUMNS; i++) m->events[i].width = 8;
    for (int i = 0; i < BLOCK_COLUMNS; i++) m->blocks[i].width = 8;
    for (int i = 0; i < SEGMENT_COLUMNS; i++) m->segments[i].width = 8;
    m->events[EVENT_DEVICE].width = 2;
    m->events[EVENT_ACTION].width = 1;
    m->events[EVENT_STACK].width = 4;
    m->frame_name.width = m->frame_file.width = m->stack_frames.width = 4;
    m->arena.width = 1;
}

/* `texts`: the known ones, with NULL at the end. */
Machine *snapshot_new(const char *const *texts, int64_t num_states, int64_t num_actions, int64_t max_memo,
                      int64_t max_stack, uint64_t seed0, uint64_t seed1) {
    Machine *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    set_widths(m);
    m->num_states = num_states;
    m->num_actions = num_actions;
    m->max_memo = max_memo;
    m->max_stack = max_stack;
    m->seed[0] = seed0;
    m->seed[1] = seed1;
    int ok = push64(&m->text_begin, 0) && push64(&m->stack_begin, 0) && grow(&m->arena, 1) &&
             grow(&m->stack_frames, 1);
    for (int64_t i = 0; ok && texts[i]; i++)
        ok = intern_text(m, texts[i], (int64_t)strlen(texts[i])) == i;
    ok = ok && intern_stack(m, INTS32(m->stack_frames), 0) == 0;
    if (ok) return m;
    snapshot_free(m);
    return NULL;
}

/* How many bytes were taken: whole instructions only. */
int64_t snapshot_feed(Machine *m, const uint8_t *data, int64_t size) {
    int64_t place = 0;
    m->needed = 1;
    while (place < size && m->state == RUNNING) {
        int64_t taken = step(m, data + place, size - place);
        if (!taken) break;
        place += taken;
        m->needed = 1;
    }
    return place;
}

/* The file ended: open lists take what is there, open dicts nothing. */
void snapshot_cut(Machine *m) {
    while (m->marks.num && m->state == RUNNING) {
        int64_t mark = pop_mark(m);
        if (mark < 0) return;
        if (mark > 0 && is_list(TAG(WORDS(m->stack)[mark - 1])) &&
            !fill_list(m, mark - 1, WORDS(m->stack) + mark, m->stack.num - mark))
            return;
        m->stack.num = mark;
    }
}

/* Traces become devices, lists of blocks segments; what only reading needs is given back. */
void snapshot_finish(Machine *m) {
    int16_t *device = INTS16(m->events[EVENT_DEVICE]);
    for (int64_t row = 0; row < m->events[EVENT_DEVICE].num; row++) {
        if (device[row] < 0) {
            m->num_odd++;
            continue;
        }
        int64_t found = INTS64(m->trace_device)[device[row]];
        if (found >= 0) device[row] = (int16_t)found;
    }
    int64_t *segment = INTS64(m->blocks[BLOCK_SEGMENT]);
    for (int64_t row = 0; row < m->blocks[BLOCK_SEGMENT].num; row++)
        if (segment[row] >= 0) segment[row] = INTS64(m->blocks_segment)[segment[row]];
    drop(&m->memo);
    drop(&m->stack);
    drop(&m->marks);
    free(m->texts.slot);
    free(m->frames.slot);
    free(m->stacks.slot);
    m->texts.slot = m->frames.slot = m->stacks.slot = NULL;
    m->texts.num_slots = m->frames.num_slots = m->stacks.num_slots = 0;
}

static int64_t *look_at(int64_t *out, const Column *column) {
    *out++ = column->num;
    *out++ = (int64_t)(intptr_t)column->data;
    return out;
}

/* How many numbers snapshot_look writes: six, then two for each column. */
int64_t snapshot_num_looked(void) {
    return 6 + 2 * (SEGMENT_COLUMNS + BLOCK_COLUMNS + EVENT_COLUMNS + 7);
}

/* Counts, then number and address of every column; see snapshot_native.py. */
void snapshot_look(const Machine *m, int64_t *out) {
    *out++ = m->state;
    *out++ = m->error;
    *out++ = m->error_value;
    *out++ = m->needed;
    *out++ = m->num_odd;
    *out++ = m->has_root;
    for (int i = 0; i < SEGMENT_COLUMNS; i++) out = look_at(out, &m->segments[i]);
    for (int i = 0; i < BLOCK_COLUMNS; i++) out = look_at(out, &m->blocks[i]);
    for (int i = 0; i < EVENT_COLUMNS; i++) out = look_at(out, &m->events[i]);
    out = look_at(out, &m->stack_begin);
    out = look_at(out, &m->stack_frames);
    out = look_at(out, &m->frame_name);
    out = look_at(out, &m->frame_file);
    out = look_at(out, &m->frame_line);
    out = look_at(out, &m->text_begin);
    look_at(out, &m->arena);
}
