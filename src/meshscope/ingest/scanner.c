/* Reads the events of a Chrome-form JSON trace into columns, a buffer at a time.
 *
 * No Python in here: plain C99, loaded with ctypes where it could be compiled. `python_scanner.py`
 * and `trace_batches.py` do the same without it, and tests hold the two against each other.
 *
 * Complete events (phase X) grow the columns in which they stay: category, track and ids are
 * decided here, once. Events of other phases, which are few, are given a batch at a time.
 *
 * A feed takes whole values only: what is cut off at the end of the buffer is left for the next
 * call. Nothing recurses, every read is checked against the end, and text is never trusted: strings
 * are kept as they stand between their quotes.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MISSING INT64_MIN
#define NOT_A_NUMBER_TEXT (INT64_MIN + 1)

enum { AT_START, IN_OBJECT, IN_EVENTS, AT_END, BROKEN };
enum { TYPE_INT, TYPE_FLOAT, TYPE_STRING, TYPE_WORD, TYPE_RAW };
enum { OK = 0, MORE = 1, BAD = 2, NO_MEMORY = 3 };
enum { ERROR_NONE, ERROR_SYNTAX, ERROR_NOT_A_TRACE, ERROR_MEMORY };

typedef struct {
    uint64_t hash;
    int64_t offset; /* into the arena */
    int32_t length;
} Symbol;

/* Numbers in four bytes until one does not fit; then all in eight. */
typedef struct {
    int32_t *narrow;
    int64_t *wide;
} Numbers;

/* Events of any phase but X, or, where the caller asks for it, of all. */
typedef struct {
    uint8_t *phase;
    int32_t *category;
    int32_t *name;
    int64_t *pid;
    int64_t *tid;
    int64_t *ts_ns;
    int64_t *dur_ns;
    int64_t num, room;
} Events;

typedef struct {
    int32_t *event;
    uint8_t *key;
    uint8_t *type;
    Numbers value;
    int64_t num, room;
} Arguments;

/* Complete events, as they stay. */
typedef struct {
    uint8_t *category; /* code */
    int32_t *name;
    int32_t *track;
    int64_t *begin_ns;
    Numbers duration_ns;
    Numbers external_id;
    Numbers correlation;
    int32_t *stream;
    int16_t *device;
    int64_t num, room;
} Columns;

typedef struct {
    int64_t pid, tid;
} Track;

typedef struct {
    int type;
    int64_t value;
} Value;

typedef struct {
    int32_t key;
    Value value;
} Said;

enum { DENSE_EXTERNAL_ID, DENSE_CORRELATION, DENSE_STREAM, DENSE_DEVICE, NUM_DENSE };
#define NO_VALUE (-1)
#define NUM_KEY_SLOTS 1024

typedef struct {
    int64_t key; /* symbol */
    int64_t value; /* symbol, raw text */
} Field;

#define GAP_PIECES 4
#define MAX_GAP (16 * GAP_PIECES)
#define NUM_WAYS 4
#define GAPS_AT_ONCE 64
#define MAX_GAPS (32 * GAPS_AT_ONCE)
#define GAP_END (-2)

/* What stood between two values, and the gaps that were seen behind the second. */
typedef struct Gap Gap;
struct Gap {
    char text[MAX_GAP];
    uint16_t needed[GAP_PIECES]; /* of each 16 bytes of the text, those that are compared */
    int32_t length;
    int32_t kind; /* the key of the value that follows; an event's, or an argument's, or -1 */
    Gap *ways[NUM_WAYS]; /* up to the first NULL */
    Gap *within; /* where the value is an event's arguments: the place from which they begin */
};

typedef struct {
    int state;
    int error;
    int is_list; /* the file is a list of events, without an object around it */
    int is_raw; /* complete events are given in batches, too */
    int with_python;
    int python_code, module_code;
    int64_t num_skipped; /* events that were not wanted */
    int64_t num_event_lists;
    int64_t num_complete; /* of phase X, kept or not */
    int64_t num_incomplete; /* of these, without a begin or a length */
    int32_t num_keys;
    int32_t num_dropped; /* keys that only `Events` keep stand ahead of the others */
    uint8_t wanted_phase[256];
    uint8_t *code; /* by symbol, for categories known at the start */
    int32_t num_codes;
    int32_t last_category; /* symbol; most events have the category of the one before */
    int32_t *slots;
    int64_t num_slots;
    Symbol *symbols;
    int64_t num_symbols, symbol_room;
    char *arena;
    int64_t arena_size, arena_room;
    int16_t key_slots[NUM_KEY_SLOTS];
    Events events;
    Arguments event_arguments;
    Columns columns;
    Arguments arguments;
    Track *tracks;
    int32_t *track_slots;
    int64_t num_tracks, track_room, num_track_slots, last_track;
    Said *said; /* of the event under way */
    int64_t num_said, said_room;
    Field *fields;
    int64_t num_fields, field_room;
    Gap *gaps[MAX_GAPS / GAPS_AT_ONCE]; /* the first is that from which events begin */
    int32_t num_gaps;
} Scanner;

static const char MODULE_PREFIX[] = "nn.Module: ";

/* ---- text ------------------------------------------------------------------------------- */

static inline const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

/* What a number or a word ends with. */
static const uint8_t ENDS[256] = {
    [','] = 1, ['}'] = 1, [']'] = 1, [' '] = 1, ['\n'] = 1, ['\r'] = 1,
    ['\t'] = 1, [':'] = 1, ['"'] = 1, ['{'] = 1, ['['] = 1,
};

static inline int is_end(char c) { return ENDS[(uint8_t)c]; }

/* `p` is behind the opening quote; the result is at the closing one, or NULL when it is not there.
 * Each byte is looked at once, however many escapes there are. */
static inline const char *find_quote(const char *p, const char *end) {
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), escape = _mm_set1_epi8('\\');
    while (end - p >= 16) {
        __m128i text = _mm_loadu_si128((const __m128i *)p);
        int found = _mm_movemask_epi8(
            _mm_or_si128(_mm_cmpeq_epi8(text, quote), _mm_cmpeq_epi8(text, escape))
        );
        if (!found) {
            p += 16;
            continue;
        }
        p += __builtin_ctz((unsigned)found);
        if (*p == '"') return p;
        if (end - p < 2) return NULL;
        p += 2;
    }
#endif
    while (p < end) {
        if (*p == '"') return p;
        if (*p == '\\') {
            if (end - p < 2) return NULL;
            p++;
        }
        p++;
    }
    return NULL;
}

/* Brackets are counted 64 bytes at a time: what stands between quotes is masked, where no quote of
 * the block is behind an escape. */
#ifdef __SSE2__
#define BLOCK 64

static inline uint64_t mask_of(const __m128i *text, __m128i wanted) {
    uint64_t found = 0;
    for (int i = 0; i < BLOCK / 16; i++)
        found |= (uint64_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text[i], wanted)) << (16 * i);
    return found;
}

/* Each bit: whether an odd number of bits is set up to it. */
static inline uint64_t sum_bits(uint64_t bits) {
    bits ^= bits << 1;
    bits ^= bits << 2;
    bits ^= bits << 4;
    bits ^= bits << 8;
    bits ^= bits << 16;
    return bits ^ bits << 32;
}

/* Goes on while blocks are whole and have no escape. `*depth` becomes 0 where the result is behind
 * the last bracket; `*inside` is all ones where it is in a string. */
static const char *skip_blocks(const char *p, const char *end, int64_t *depth, uint64_t *inside) {
    const __m128i fold = _mm_set1_epi8(0x20);
    while (end - p >= BLOCK) {
        __m128i text[BLOCK / 16], folded[BLOCK / 16]; /* [ and ] become { and } */
        for (int i = 0; i < BLOCK / 16; i++) {
            text[i] = _mm_loadu_si128((const __m128i *)p + i);
            folded[i] = _mm_or_si128(text[i], fold);
        }
        if (mask_of(text, _mm_set1_epi8('\\'))) return p;
        uint64_t strings = sum_bits(mask_of(text, _mm_set1_epi8('"'))) ^ *inside;
        uint64_t opening = mask_of(folded, _mm_set1_epi8('{')) & ~strings;
        uint64_t closing = mask_of(folded, _mm_set1_epi8('}')) & ~strings;
        if (__builtin_popcountll(closing) < *depth) {
            *depth += __builtin_popcountll(opening) - __builtin_popcountll(closing);
        } else {
            for (uint64_t left = opening | closing; left; left &= left - 1) {
                int at = __builtin_ctzll(left);
                if (opening >> at & 1) ++*depth;
                else if (--*depth == 0) return p + at + 1;
            }
        }
        *inside = 0 - (strings >> 63);
        p += BLOCK;
    }
    return p;
}
#endif

/* Behind as many closing brackets as `depth` says, which is at least 1; NULL when it is cut off. */
static const char *skip_deep(const char *p, const char *end, int64_t depth, int *status) {
    *status = MORE;
    const char *is_sure = p; /* bytes before it are taken one at a time */
    while (p < end) {
#ifdef __SSE2__
        if (p >= is_sure && end - p >= BLOCK) {
            uint64_t inside = 0;
            p = skip_blocks(p, end, &depth, &inside);
            if (depth == 0) {
                *status = OK;
                return p;
            }
            is_sure = p + BLOCK; /* an escape in this block, or its end is cut off */
            if (inside) {
                p = find_quote(p, end);
                if (!p) return NULL;
                p++;
            }
            continue;
        }
#endif
        char c = *p++;
        if (c == '"') {
            p = find_quote(p, end);
            if (!p) return NULL;
            p++;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && --depth == 0) {
            *status = OK;
            return p;
        }
    }
    return NULL;
}

/* Behind the value that begins at `p`, which is no space; NULL when it is cut off or none. */
static inline const char *skip_value(const char *p, const char *end, int *status) {
    *status = MORE;
    char c = *p;
    if (c == '"') {
        p = find_quote(p + 1, end);
        if (!p) return NULL;
        p++;
    } else if (c == '{' || c == '[') {
        return skip_deep(p + 1, end, 1, status);
    } else {
        const char *begin = p;
        while (p < end && !is_end(*p)) p++;
        if (p == begin) {
            *status = BAD;
            return NULL;
        }
        if (p >= end) return NULL;
    }
    *status = OK;
    return p;
}

/* ---- symbols ---------------------------------------------------------------------------- */

static inline uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ULL;
    h ^= h >> 29;
    return h;
}

static inline uint64_t hash_text(const char *p, int64_t n) {
    uint64_t h = 0x9e3779b97f4a7c15ULL ^ (uint64_t)n, word = 0;
    if (n < 8) {
        for (int64_t i = 0; i < n; i++) word |= (uint64_t)(uint8_t)p[i] << (8 * i);
        return mix(h ^ word);
    }
    const char *last = p + n - 8;
    for (; p < last; p += 8) {
        memcpy(&word, p, 8);
        h = mix(h ^ word) + 0x9e3779b97f4a7c15ULL;
    }
    memcpy(&word, last, 8); /* overlaps the one before, unless it fits */
    return mix(h ^ word);
}

static int grow_slots(Scanner *s) {
    int64_t size = s->num_slots ? s->num_slots * 2 : 4096;
    int32_t *slots = malloc((size_t)size * sizeof *slots);
    if (!slots) return NO_MEMORY;
    memset(slots, 0xff, (size_t)size * sizeof *slots);
    for (int64_t i = 0; i < s->num_symbols; i++) {
        uint64_t at = s->symbols[i].hash & (uint64_t)(size - 1);
        while (slots[at] >= 0) at = (at + 1) & (uint64_t)(size - 1);
        slots[at] = (int32_t)i;
    }
    free(s->slots);
    s->slots = slots;
    s->num_slots = size;
    return OK;
}

static int32_t intern(Scanner *s, const char *p, int64_t n) {
    if (s->num_symbols * 2 >= s->num_slots && grow_slots(s) != OK) return -1;
    uint64_t hash = hash_text(p, n);
    uint64_t at = hash & (uint64_t)(s->num_slots - 1);
    while (s->slots[at] >= 0) {
        Symbol *symbol = &s->symbols[s->slots[at]];
        if (symbol->hash == hash && symbol->length == n &&
            memcmp(s->arena + symbol->offset, p, (size_t)n) == 0)
            return s->slots[at];
        at = (at + 1) & (uint64_t)(s->num_slots - 1);
    }
    if (n > INT32_MAX || s->num_symbols >= INT32_MAX) return -1;
    if (s->num_symbols == s->symbol_room) {
        int64_t room = s->symbol_room ? s->symbol_room * 2 : 1024;
        Symbol *symbols = realloc(s->symbols, (size_t)room * sizeof *symbols);
        if (!symbols) return -1;
        s->symbols = symbols;
        s->symbol_room = room;
    }
    if (s->arena_size + n > s->arena_room) {
        int64_t room = s->arena_room ? s->arena_room : 1 << 16;
        while (room < s->arena_size + n) room *= 2;
        char *arena = realloc(s->arena, (size_t)room);
        if (!arena) return -1;
        s->arena = arena;
        s->arena_room = room;
    }
    memcpy(s->arena + s->arena_size, p, (size_t)n);
    Symbol *symbol = &s->symbols[s->num_symbols];
    symbol->hash = hash;
    symbol->offset = s->arena_size;
    symbol->length = (int32_t)n;
    s->arena_size += n;
    s->slots[at] = (int32_t)s->num_symbols;
    return (int32_t)s->num_symbols++;
}

/* ---- numbers ---------------------------------------------------------------------------- */

/* A decimal number times 10^`shift`, rounded half up; MISSING when it is no number or too large. */
static int64_t scale_number(const char *p, const char *end, int shift) {
    int is_negative = 0;
    if (p < end && (*p == '-' || *p == '+')) is_negative = *p++ == '-';
    uint64_t value = 0;
    int num_digits = 0, exponent = shift, is_any = 0, is_rounded_up = 0, is_dropped = 0;
    for (; p < end && *p >= '0' && *p <= '9'; p++) {
        is_any = 1;
        if (num_digits < 19) {
            value = value * 10 + (uint64_t)(*p - '0');
            if (value) num_digits++;
        } else {
            exponent++;
        }
    }
    if (p < end && *p == '.') {
        for (p++; p < end && *p >= '0' && *p <= '9'; p++) {
            is_any = 1;
            if (exponent > 0 && num_digits < 19) {
                value = value * 10 + (uint64_t)(*p - '0');
                if (value) num_digits++;
                exponent--;
            } else if (!is_dropped) {
                is_dropped = 1;
                is_rounded_up = exponent == 0 && *p >= '5';
            }
        }
    }
    if (!is_any) return MISSING;
    if (p < end && (*p == 'e' || *p == 'E')) return NOT_A_NUMBER_TEXT;
    if (p != end) return MISSING;
    for (; exponent > 0; exponent--) {
        if (value > UINT64_MAX / 10) return value ? MISSING : 0;
        value *= 10;
    }
    value += (uint64_t)is_rounded_up;
    if (value > (uint64_t)INT64_MAX) return MISSING;
    return is_negative ? -(int64_t)value : (int64_t)value;
}

/* Digits, signs, a point and an exponent, or what json.dumps writes for what is no number. */
static int parse_double(const char *p, const char *end, double *out) {
    char text[64];
    int64_t n = end - p;
    if (n <= 0 || n >= (int64_t)sizeof text) return 0;
    memcpy(text, p, (size_t)n);
    text[n] = 0;
    if (strspn(text, "0123456789+-.eE") != (size_t)n && strcmp(text, "NaN") != 0 &&
        strcmp(text + (text[0] == '-'), "Infinity") != 0)
        return 0;
    char *stop;
    *out = strtod(text, &stop);
    return stop == text + n;
}

static int64_t read_time(const char *p, const char *end) {
    int64_t ns = scale_number(p, end, 3);
    if (ns == NOT_A_NUMBER_TEXT) {
        double us;
        ns = MISSING;
        if (parse_double(p, end, &us) && fabs(us) < 9e15) ns = (int64_t)llround(us * 1000.0);
    }
    return ns;
}

/* The value of eight digits, the first in the lowest byte; a byte of 0 is a digit 0. */
static inline uint64_t join_digits(uint64_t word) {
    word = (word & 0x0f0f0f0f0f0f0f0fULL) * 2561 >> 8;
    word = (word & 0x00ff00ff00ff00ffULL) * 6553601 >> 16;
    return (word & 0x0000ffff0000ffffULL) * 42949672960001ULL >> 32;
}

/* Digits from `p` on; as many as there are, of which the value holds the first 18. Where a number
 * ends is not known ahead, so that nothing branches on it. */
static inline const char *read_digits(const char *p, const char *end, uint64_t *value) {
    static const uint32_t powers[9] = {
        1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000,
    };
    uint64_t found = *value;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (end - p >= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        uint64_t others = ((word & 0xf0f0f0f0f0f0f0f0ULL) ^ 0x3030303030303030ULL) |
                          (((word + 0x0606060606060606ULL) & 0xf0f0f0f0f0f0f0f0ULL) ^ 0x3030303030303030ULL);
        if (others) {
            int num = __builtin_ctzll(others) / 8;
            if (num) word <<= 64 - 8 * num;
            *value = num ? found * powers[num] + join_digits(word) : found;
            return p + num;
        }
        found = found * powers[8] + join_digits(word);
        p += 8;
    }
#endif
    for (; p < end && *p >= '0' && *p <= '9'; p++) found = found * 10 + (uint64_t)(*p - '0');
    *value = found;
    return p;
}

/* The usual forms, `-12` and `12.345`, without reading them twice. NULL for any other, which
 * `skip_value` and `scale_number` take. */
static inline const char *read_plain_time(const char *p, const char *end, int64_t *ns) {
    uint64_t value = 0;
    const char *begin = p;
    p = read_digits(p, end, &value);
    if (p == begin || p - begin > 15 || p >= end) return NULL;
    value *= 1000;
    if (*p == '.') {
        static const uint16_t units[4] = {1000, 100, 10, 1};
        uint64_t fraction = 0;
        const char *point = p++;
        p = read_digits(p, end, &fraction);
        int64_t num = p - point - 1;
        if (p >= end || num > 18) return NULL;
        if (num > 3) { /* rounded by the fourth */
            for (; num > 4; num--) fraction /= 10;
            fraction = (fraction + 5) / 10;
            num = 3;
        }
        value += fraction * units[num];
    }
    if (!is_end(*p)) return NULL;
    *ns = (int64_t)value;
    return p;
}

static inline const char *read_plain_int(const char *p, const char *end, int64_t *number) {
    uint64_t value = 0;
    int is_negative = *p == '-';
    p += is_negative;
    const char *begin = p;
    p = read_digits(p, end, &value);
    if (p == begin || p - begin > 18 || p >= end || !is_end(*p)) return NULL;
    *number = is_negative ? -(int64_t)value : (int64_t)value;
    return p;
}

/* ---- values ----------------------------------------------------------------------------- */

static Value number_value(Scanner *s, const char *p, const char *end) {
    Value found = {TYPE_WORD, 0};
    int is_integer = 1;
    for (const char *q = p; q < end; q++)
        if (!((*q >= '0' && *q <= '9') || (*q == '-' && q == p))) is_integer = 0;
    if (is_integer) {
        int64_t value = scale_number(p, end, 0);
        if (value != MISSING) return (Value){TYPE_INT, value};
    }
    double number;
    if (parse_double(p, end, &number)) {
        found.type = TYPE_FLOAT;
        memcpy(&found.value, &number, 8);
        return found;
    }
    found.value = intern(s, p, end - p);
    return found;
}

/* Reads any value; text of lists and objects is kept as it stands. */
static const char *read_value(
    Scanner *s, const char *p, const char *end, Value *found, int *status
) {
    if (*p == '"') {
        const char *quote = find_quote(p + 1, end);
        *status = MORE;
        if (!quote) return NULL;
        found->type = TYPE_STRING;
        found->value = intern(s, p + 1, quote - p - 1);
        p = quote + 1;
    } else if (*p == '{' || *p == '[') {
        const char *after = skip_value(p, end, status);
        if (!after) return NULL;
        found->type = TYPE_RAW;
        found->value = intern(s, p, after - p);
        p = after;
    } else {
        const char *after = read_plain_int(p, end, &found->value);
        if (after) {
            found->type = TYPE_INT;
            *status = OK;
            return after;
        }
        after = skip_value(p, end, status);
        if (!after) return NULL;
        *found = number_value(s, p, after);
        p = after;
    }
    *status = OK;
    int is_symbol = found->type != TYPE_INT && found->type != TYPE_FLOAT;
    if (is_symbol && found->value < 0) {
        *status = NO_MEMORY;
        return NULL;
    }
    return p;
}

/* ---- growing columns -------------------------------------------------------------------- */

#define GROW(pointer, room)                                                      \
    do {                                                                         \
        void *grown = realloc((pointer), (size_t)(room) * sizeof *(pointer));    \
        if (!grown) return NO_MEMORY;                                            \
        (pointer) = grown;                                                       \
    } while (0)

static int reserve_event(Events *e) {
    if (e->num < e->room) return OK;
    int64_t room = e->room ? e->room + e->room / 2 : 256;
    if (room > INT32_MAX) return NO_MEMORY;
    GROW(e->phase, room);
    GROW(e->category, room);
    GROW(e->name, room);
    GROW(e->pid, room);
    GROW(e->tid, room);
    GROW(e->ts_ns, room);
    GROW(e->dur_ns, room);
    e->room = room;
    return OK;
}

static int grow_numbers(Numbers *n, int64_t room) {
    if (n->wide) GROW(n->wide, room);
    else GROW(n->narrow, room);
    return OK;
}

static int widen(Numbers *n, int64_t num, int64_t room) {
    n->wide = malloc((size_t)room * sizeof *n->wide);
    if (!n->wide) return NO_MEMORY;
    for (int64_t i = 0; i < num; i++) n->wide[i] = n->narrow[i];
    free(n->narrow);
    n->narrow = NULL;
    return OK;
}

static inline int put_number(Numbers *n, int64_t at, int64_t room, int64_t value) {
    if (!n->wide) {
        if (value >= INT32_MIN && value <= INT32_MAX) {
            n->narrow[at] = (int32_t)value;
            return OK;
        }
        if (widen(n, at, room) != OK) return NO_MEMORY;
    }
    n->wide[at] = value;
    return OK;
}

static int reserve_column(Columns *c) {
    if (c->num < c->room) return OK;
    int64_t room = c->room ? c->room + c->room / 2 : 256;
    if (room > INT32_MAX) return NO_MEMORY;
    GROW(c->category, room);
    GROW(c->name, room);
    GROW(c->track, room);
    GROW(c->begin_ns, room);
    GROW(c->stream, room);
    GROW(c->device, room);
    if (grow_numbers(&c->duration_ns, room) != OK) return NO_MEMORY;
    if (grow_numbers(&c->external_id, room) != OK) return NO_MEMORY;
    if (grow_numbers(&c->correlation, room) != OK) return NO_MEMORY;
    c->room = room;
    return OK;
}

static int put_argument(Arguments *a, int64_t event, const Said *said) {
    if (a->num == a->room) {
        int64_t room = a->room ? a->room + a->room / 2 : 256;
        GROW(a->event, room);
        GROW(a->key, room);
        GROW(a->type, room);
        if (grow_numbers(&a->value, room) != OK) return NO_MEMORY;
        a->room = room;
    }
    a->event[a->num] = (int32_t)event;
    a->key[a->num] = (uint8_t)said->key;
    a->type[a->num] = (uint8_t)said->value.type;
    if (put_number(&a->value, a->num, a->room, said->value.value) != OK) return NO_MEMORY;
    a->num++;
    return OK;
}

/* What the event under way says; of a key that is there twice the last value counts. */
static int put_said(Scanner *s, int32_t key, Value value) {
    for (int64_t i = 0; i < s->num_said; i++) {
        if (s->said[i].key == key) {
            s->said[i].value = value;
            return OK;
        }
    }
    if (s->num_said == s->said_room) {
        int64_t room = s->said_room ? s->said_room * 2 : 64;
        GROW(s->said, room);
        s->said_room = room;
    }
    s->said[s->num_said].key = key;
    s->said[s->num_said].value = value;
    s->num_said++;
    return OK;
}

static int grow_tracks(Scanner *s) {
    int64_t size = s->num_track_slots ? s->num_track_slots * 2 : 256;
    GROW(s->tracks, size);
    GROW(s->track_slots, size);
    memset(s->track_slots, 0xff, (size_t)size * sizeof *s->track_slots);
    s->num_track_slots = size;
    for (int64_t i = 0; i < s->num_tracks; i++) {
        uint64_t at = mix((uint64_t)s->tracks[i].pid * 31 + (uint64_t)s->tracks[i].tid);
        at &= (uint64_t)(size - 1);
        while (s->track_slots[at] >= 0) at = (at + 1) & (uint64_t)(size - 1);
        s->track_slots[at] = (int32_t)i;
    }
    return OK;
}

/* The number of a process's thread, in the order in which they appear; -1 without memory. */
static inline int32_t find_track(Scanner *s, int64_t pid, int64_t tid) {
    if (s->num_tracks) {
        Track *last = &s->tracks[s->last_track];
        if (last->pid == pid && last->tid == tid) return (int32_t)s->last_track;
    }
    if (s->num_tracks * 2 >= s->num_track_slots && grow_tracks(s) != OK) return -1;
    uint64_t mask = (uint64_t)(s->num_track_slots - 1);
    uint64_t at = mix((uint64_t)pid * 31 + (uint64_t)tid) & mask;
    for (; s->track_slots[at] >= 0; at = (at + 1) & mask) {
        Track *track = &s->tracks[s->track_slots[at]];
        if (track->pid == pid && track->tid == tid) {
            s->last_track = s->track_slots[at];
            return s->track_slots[at];
        }
    }
    s->tracks[s->num_tracks].pid = pid;
    s->tracks[s->num_tracks].tid = tid;
    s->track_slots[at] = (int32_t)s->num_tracks;
    s->last_track = s->num_tracks;
    return (int32_t)s->num_tracks++;
}

static int put_field(Scanner *s, int64_t key, int64_t value) {
    if (s->num_fields == s->field_room) {
        int64_t room = s->field_room ? s->field_room * 2 : 64;
        GROW(s->fields, room);
        s->field_room = room;
    }
    s->fields[s->num_fields].key = key;
    s->fields[s->num_fields].value = value;
    s->num_fields++;
    return OK;
}

/* ---- events ----------------------------------------------------------------------------- */

enum { KEY_OTHER, KEY_PH, KEY_CAT, KEY_NAME, KEY_PID, KEY_TID, KEY_TS, KEY_DUR, KEY_ARGS };

/* The keys of an event, told by length and letters. */
static inline int event_key(const char *p, int64_t n) {
    if (n == 2) {
        if (p[0] == 'p' && p[1] == 'h') return KEY_PH;
        if (p[0] == 't' && p[1] == 's') return KEY_TS;
    } else if (n == 3) {
        if (memcmp(p, "cat", 3) == 0) return KEY_CAT;
        if (memcmp(p, "pid", 3) == 0) return KEY_PID;
        if (memcmp(p, "tid", 3) == 0) return KEY_TID;
        if (memcmp(p, "dur", 3) == 0) return KEY_DUR;
    } else if (n == 4) {
        if (memcmp(p, "name", 4) == 0) return KEY_NAME;
        if (memcmp(p, "args", 4) == 0) return KEY_ARGS;
    }
    return KEY_OTHER;
}

/* Arguments that are kept are found by their length and how they begin and end. */
static inline uint64_t key_slot(const char *p, int64_t n) {
    uint64_t letters = (uint64_t)(uint8_t)p[0] | (uint64_t)(uint8_t)p[n / 2] << 8 |
                       (uint64_t)(uint8_t)p[n - 1] << 16 | (uint64_t)n << 24;
    return mix(letters) & (NUM_KEY_SLOTS - 1);
}

static inline int32_t argument_key(const Scanner *s, const char *p, int64_t n) {
    if (!n) return -1;
    for (uint64_t at = key_slot(p, n); s->key_slots[at] >= 0; at = (at + 1) & (NUM_KEY_SLOTS - 1)) {
        const Symbol *symbol = &s->symbols[s->key_slots[at]]; /* keys are the first symbols */
        if (symbol->length == n && memcmp(s->arena + symbol->offset, p, (size_t)n) == 0)
            return s->key_slots[at];
    }
    return -1;
}

/* A key and its colon; the result is at the value. `*key_end` is at the closing quote. */
static inline const char *read_key(
    const char *p, const char *end, const char **key_end, int *status
) {
    if (*p != '"') {
        *status = BAD;
        return NULL;
    }
    const char *quote = find_quote(p + 1, end);
    *status = MORE;
    if (!quote) return NULL;
    *key_end = quote;
    p = skip_space(quote + 1, end);
    if (p >= end) return NULL;
    if (*p != ':') {
        *status = BAD;
        return NULL;
    }
    p = skip_space(p + 1, end);
    if (p >= end) return NULL;
    *status = OK;
    return p;
}

/* ---- gaps ------------------------------------------------------------------------------- */

/* What stands between two values: spaces, commas, a key and its colon, or a closing bracket. The
 * events of a trace are alike, so that the same gaps follow each other: each is compared with those
 * that came here before, and read letter by letter only where it is new. */

enum { IN_EVENT, IN_ARGUMENTS };

static const char *read_gap(
    const Scanner *s, const char *p, const char *end, int where, int32_t *kind, int *status
) {
    for (;; p++) {
        p = skip_space(p, end);
        *status = MORE;
        if (p >= end) return NULL;
        if (*p != ',') break;
    }
    if (*p == '}') {
        *kind = GAP_END;
        *status = OK;
        return p + 1;
    }
    const char *name = p + 1, *name_end;
    p = read_key(p, end, &name_end, status);
    if (!p) return NULL;
    *kind = where == IN_EVENT ? event_key(name, name_end - name)
                              : argument_key(s, name, name_end - name);
    return p;
}

static inline int is_at_gap(const Gap *gap, const char *p) {
#ifdef __SSE2__
    for (int piece = 0; piece < GAP_PIECES; piece++) {
        __m128i text = _mm_loadu_si128((const __m128i *)p + piece);
        __m128i known = _mm_loadu_si128((const __m128i *)gap->text + piece);
        unsigned equal = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(text, known));
        if (gap->needed[piece] & ~equal) return 0;
        if (gap->length <= 16 * (piece + 1)) return 1;
    }
    return 1;
#else
    return memcmp(p, gap->text, (size_t)gap->length) == 0;
#endif
}

static inline int is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

/* NULL where there is no room, or no memory, for another. */
static Gap *take_gap(Scanner *s) {
    if (s->num_gaps == MAX_GAPS) return NULL;
    int32_t block = s->num_gaps / GAPS_AT_ONCE;
    if (!s->gaps[block]) s->gaps[block] = calloc(GAPS_AT_ONCE, sizeof *s->gaps[block]);
    if (!s->gaps[block]) return NULL;
    return &s->gaps[block][s->num_gaps++ % GAPS_AT_ONCE];
}

/* Remembers a gap behind `before`; NULL where there is no room for it. */
static Gap *learn_gap(Scanner *s, Gap *before, const char *p, int64_t length, int32_t kind) {
    int way = 0;
    while (way < NUM_WAYS && before->ways[way]) way++;
    if (length > MAX_GAP || way == NUM_WAYS) return NULL;
    Gap *gap = take_gap(s);
    if (!gap) return NULL;
    memcpy(gap->text, p, (size_t)length);
    for (int64_t i = 0; i < length; i++) gap->needed[i / 16] |= (uint16_t)(1U << i % 16);
    gap->length = (int32_t)length;
    gap->kind = kind;
    before->ways[way] = gap;
    return gap;
}

/* Behind the gap at `p`: at a value, unless `*kind` is GAP_END. `*place` is the gap before, or that
 * from which events or arguments begin; NULL where it was not remembered. */
static inline const char *pass_gap(
    Scanner *s, const char *p, const char *end, int where, Gap **place, int32_t *kind, int *status
) {
    if (*place && end - p > MAX_GAP) {
        Gap **ways = (*place)->ways;
        for (int way = 0; way < NUM_WAYS && ways[way]; way++) {
            Gap *gap = ways[way];
            if (!is_at_gap(gap, p)) continue;
            if (gap->kind != GAP_END && is_space(p[gap->length])) continue;
            if (way) { /* what came last is looked at sooner */
                ways[way] = ways[way - 1];
                ways[way - 1] = gap;
            }
            *place = gap;
            *kind = gap->kind;
            *status = OK;
            return p + gap->length;
        }
    }
    const char *begin = p;
    p = read_gap(s, p, end, where, kind, status);
    if (p && *place) *place = learn_gap(s, *place, begin, p - begin, *kind);
    return p;
}

static const char *read_arguments(
    Scanner *s, const char *p, const char *end, Gap **place, int *status
) {
    p++;
    for (;;) {
        int32_t key;
        p = pass_gap(s, p, end, IN_ARGUMENTS, place, &key, status);
        if (!p || key == GAP_END) return p;
        if (key >= 0) {
            Value value = {TYPE_WORD, 0};
            p = read_value(s, p, end, &value, status);
            if (!p) return NULL;
            *status = put_said(s, key, value);
            if (*status != OK) return NULL;
        } else {
            p = skip_value(p, end, status);
            if (!p) return NULL;
        }
    }
}

typedef struct {
    int phase;
    int32_t category, name;
    int64_t pid, tid, ts_ns, dur_ns;
    int is_skipped;
} Event;

/* A whole number written as a float is one: tables that wrote a trace again turn ids into these. */
static int is_whole(Value *value) {
    if (value->type == TYPE_INT) return 1;
    if (value->type != TYPE_FLOAT) return 0;
    double number;
    memcpy(&number, &value->value, 8);
    if (!(fabs(number) < 9007199254740992.0) || number != floor(number)) return 0;
    value->value = (int64_t)number;
    return 1;
}

static inline int64_t identity_of(Value value) {
    if (is_whole(&value)) return value.value;
    if (value.type == TYPE_STRING) return INT64_MIN + 2 + value.value;
    return MISSING;
}

static inline int is_timed(const Event *event) {
    return event->ts_ns != MISSING && event->dur_ns != MISSING && event->dur_ns >= 0;
}

static inline int code_of(const Scanner *s, const Event *event) {
    int code = event->category >= 0 && event->category < s->num_codes ? s->code[event->category] : 0;
    if (code != s->python_code || event->name < 0) return code;
    const Symbol *name = &s->symbols[event->name];
    int64_t length = (int64_t)sizeof MODULE_PREFIX - 1;
    int is_module = name->length >= length &&
                    memcmp(s->arena + name->offset, MODULE_PREFIX, (size_t)length) == 0;
    return is_module ? s->module_code : code;
}

/* Python functions that nobody asked for need not say more, once it is sure that they are. */
static inline int is_idle_talk(const Scanner *s, const Event *event) {
    return !s->is_raw && !s->with_python && event->phase == 'X' && is_timed(event) &&
           event->name >= 0 && code_of(s, event) == s->python_code;
}

static const char *read_category(
    Scanner *s, const char *p, const char *end, Event *event, int *status
) {
    if (s->last_category >= 0 && *p == '"') {
        const Symbol *last = &s->symbols[s->last_category];
        if (end - p > last->length + 1 && p[last->length + 1] == '"' &&
            memcmp(s->arena + last->offset, p + 1, (size_t)last->length) == 0) {
            event->category = s->last_category;
            *status = OK;
            return p + last->length + 2;
        }
    }
    Value value = {TYPE_WORD, 0};
    p = read_value(s, p, end, &value, status);
    if (!p) return NULL;
    event->category = value.type == TYPE_STRING ? (int32_t)value.value : -1;
    s->last_category = event->category;
    if (s->last_category >= 0) { /* a quote behind an escape is none */
        const Symbol *symbol = &s->symbols[s->last_category];
        if (memchr(s->arena + symbol->offset, '\\', (size_t)symbol->length)) s->last_category = -1;
    }
    return p;
}

static const char *read_phase(
    Scanner *s, const char *p, const char *end, Event *event, int *status
) {
    int is_text = *p == '"';
    const char *begin = p;
    p = skip_value(p, end, status);
    if (!p) return NULL;
    event->phase = is_text && begin[1] != '"' ? (uint8_t)begin[1] : 0;
    if (is_text && !s->wanted_phase[event->phase]) event->is_skipped = 1;
    return p;
}

static inline const char *read_moment(const char *p, const char *end, int64_t *ns, int *status) {
    const char *after = read_plain_time(p, end, ns);
    *status = OK;
    if (after) return after;
    int is_text = *p == '"';
    after = skip_value(p, end, status);
    if (after) *ns = is_text ? read_time(p + 1, after - 1) : read_time(p, after);
    return after;
}

/* Gaps behind the bracket are those of arguments, which events that are idle talk do not have. */
static const char *enter_arguments(
    Scanner *s, const char *p, const char *end, Gap **place, int *status
) {
    if (*place) {
        if (!(*place)->within) (*place)->within = take_gap(s);
        *place = (*place)->within;
    }
    return read_arguments(s, p, end, place, status);
}

static inline const char *read_member(
    Scanner *s, const char *p, const char *end, int key, Event *event, Gap **place, int *status
) {
    if (key == KEY_TS) return read_moment(p, end, &event->ts_ns, status);
    if (key == KEY_DUR) return read_moment(p, end, &event->dur_ns, status);
    if (key == KEY_PH) return read_phase(s, p, end, event, status);
    if (key == KEY_CAT) return read_category(s, p, end, event, status);
    if (key == KEY_ARGS) { /* of a key that is there twice the last counts */
        s->num_said = 0;
        if (*p == '{' && !is_idle_talk(s, event)) return enter_arguments(s, p, end, place, status);
    }
    if (key == KEY_OTHER || key == KEY_ARGS) return skip_value(p, end, status);
    Value value = {TYPE_WORD, 0};
    p = read_value(s, p, end, &value, status);
    if (!p) return NULL;
    if (key == KEY_PID) event->pid = identity_of(value);
    else if (key == KEY_TID) event->tid = identity_of(value);
    else event->name = value.type == TYPE_STRING ? (int32_t)value.value : -1;
    return p;
}

static int put_event(Scanner *s, const Event *event) {
    Events *e = &s->events;
    int64_t num_before = s->event_arguments.num;
    if (reserve_event(e) != OK) return NO_MEMORY;
    for (int64_t i = 0; i < s->num_said; i++) {
        if (put_argument(&s->event_arguments, e->num, &s->said[i]) != OK) {
            s->event_arguments.num = num_before;
            return NO_MEMORY;
        }
    }
    e->phase[e->num] = (uint8_t)event->phase;
    e->category[e->num] = event->category;
    e->name[e->num] = event->name;
    e->pid[e->num] = event->pid;
    e->tid[e->num] = event->tid;
    e->ts_ns[e->num] = event->ts_ns;
    e->dur_ns[e->num] = event->dur_ns;
    e->num++;
    return OK;
}

static int put_columns(Scanner *s, const Event *event, int code) {
    static const int64_t limits[NUM_DENSE] = {1LL << 62, 1LL << 62, 1LL << 31, 1LL << 15};
    Columns *c = &s->columns;
    int32_t track = find_track(s, event->pid, event->tid);
    if (track < 0 || reserve_column(c) != OK) return NO_MEMORY;
    int64_t dense[NUM_DENSE] = {NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE};
    for (int64_t i = 0; i < s->num_said; i++) {
        Said *said = &s->said[i];
        if (said->key < NUM_DENSE) {
            Value value = said->value;
            int64_t limit = limits[said->key];
            if (is_whole(&value) && value.value >= -limit && value.value < limit)
                dense[said->key] = value.value;
        } else if (said->key >= s->num_dropped) {
            if (put_argument(&s->arguments, c->num, said) != OK) return NO_MEMORY;
        }
    }
    c->category[c->num] = (uint8_t)code;
    c->name[c->num] = event->name;
    c->track[c->num] = track;
    c->begin_ns[c->num] = event->ts_ns;
    c->stream[c->num] = (int32_t)dense[DENSE_STREAM];
    c->device[c->num] = (int16_t)dense[DENSE_DEVICE];
    if (put_number(&c->duration_ns, c->num, c->room, event->dur_ns) != OK ||
        put_number(&c->external_id, c->num, c->room, dense[DENSE_EXTERNAL_ID]) != OK ||
        put_number(&c->correlation, c->num, c->room, dense[DENSE_CORRELATION]) != OK)
        return NO_MEMORY;
    c->num++;
    return OK;
}

static int put_complete(Scanner *s, const Event *event) {
    s->num_complete++;
    if (!is_timed(event)) {
        s->num_incomplete++;
        return OK;
    }
    int code = code_of(s, event);
    if (code == s->python_code && !s->with_python) {
        s->num_skipped++;
        return OK;
    }
    int64_t num_before = s->arguments.num;
    int status = put_columns(s, event, code);
    if (status != OK) s->arguments.num = num_before;
    return status;
}

/* One event; on anything but OK the columns are as they were. */
static const char *read_event(Scanner *s, const char *p, const char *end, int *status) {
    Event event = {0, -1, -1, MISSING, MISSING, MISSING, MISSING, 0};
    Gap *place = s->gaps[0];
    s->num_said = 0;
    p++;
    for (;;) {
        int32_t key;
        p = pass_gap(s, p, end, IN_EVENT, &place, &key, status);
        if (!p) return NULL;
        if (key == GAP_END) {
            *status = event.phase == 'X' && !s->is_raw ? put_complete(s, &event)
                                                       : put_event(s, &event);
            return *status == OK ? p : NULL;
        }
        p = read_member(s, p, end, key, &event, &place, status);
        if (!p) return NULL;
        if (event.is_skipped) {
            p = skip_deep(p, end, 1, status);
            if (p) s->num_skipped++;
            return p;
        }
    }
}

/* ---- the file --------------------------------------------------------------------------- */

static const char *feed_events(Scanner *s, const char *p, const char *end, int *status) {
    for (;; p++) {
        p = skip_space(p, end);
        *status = MORE;
        if (p >= end) return NULL;
        if (*p != ',') break;
    }
    *status = OK;
    if (*p == ']') {
        s->state = s->is_list ? AT_END : IN_OBJECT;
        return p + 1;
    }
    if (*p == '{') return read_event(s, p, end, status);
    return skip_value(p, end, status);
}

static const char *feed_object(Scanner *s, const char *p, const char *end, int *status) {
    p = skip_space(p, end);
    *status = MORE;
    if (p >= end) return NULL;
    *status = OK;
    if (*p == ',') return p + 1;
    if (*p == '}') {
        s->state = AT_END;
        return p + 1;
    }
    const char *name = p + 1, *name_end;
    p = read_key(p, end, &name_end, status);
    if (!p) return NULL;
    if (name_end - name == 11 && memcmp(name, "traceEvents", 11) == 0 && *p == '[') {
        s->state = IN_EVENTS;
        s->num_event_lists++;
        return p + 1;
    }
    const char *value = p;
    p = skip_value(p, end, status);
    if (!p) return NULL;
    int32_t key_symbol = intern(s, name, name_end - name);
    int32_t value_symbol = intern(s, value, p - value);
    *status = NO_MEMORY;
    if (key_symbol < 0 || value_symbol < 0) return NULL;
    *status = put_field(s, key_symbol, value_symbol);
    return *status == OK ? p : NULL;
}

static const char *feed_start(Scanner *s, const char *p, const char *end, int *status) {
    if (end - p >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) p += 3;
    p = skip_space(p, end);
    *status = MORE;
    if (p >= end) return NULL;
    *status = OK;
    if (*p == '{') s->state = IN_OBJECT;
    else if (*p == '[') {
        s->state = IN_EVENTS;
        s->is_list = 1;
        s->num_event_lists++;
    } else {
        s->error = ERROR_NOT_A_TRACE;
        *status = BAD;
        return NULL;
    }
    return p + 1;
}

/* Takes what is whole of the buffer in; how much that was. Then look at `state` and `error`. */
int64_t scanner_feed(Scanner *s, const char *data, int64_t size) {
    const char *p = data, *end = data + size;
    while (s->state != AT_END && s->state != BROKEN) {
        int status = OK;
        const char *next;
        if (s->state == IN_EVENTS) next = feed_events(s, p, end, &status);
        else if (s->state == IN_OBJECT) next = feed_object(s, p, end, &status);
        else next = feed_start(s, p, end, &status);
        if (next) {
            p = next;
            continue;
        }
        if (status == MORE) break;
        s->state = BROKEN;
        if (status == NO_MEMORY) s->error = ERROR_MEMORY;
        else if (!s->error) s->error = ERROR_SYNTAX;
    }
    return p - data;
}

/* ---- making and looking ----------------------------------------------------------------- */

static int32_t intern_word(Scanner *s, const char *word) {
    return intern(s, word, (int64_t)strlen(word));
}

static void free_numbers(Numbers *n) {
    free(n->narrow);
    free(n->wide);
}

static void free_arguments(Arguments *a) {
    free(a->event);
    free(a->key);
    free(a->type);
    free_numbers(&a->value);
}

static void free_symbols(Scanner *s) {
    free(s->slots);
    free(s->symbols);
    free(s->arena);
    s->slots = NULL;
    s->symbols = NULL;
    s->arena = NULL;
    s->num_slots = s->num_symbols = s->arena_size = 0;
}

static void free_batches(Scanner *s) {
    free(s->events.phase);
    free(s->events.category);
    free(s->events.name);
    free(s->events.pid);
    free(s->events.tid);
    free(s->events.ts_ns);
    free(s->events.dur_ns);
    memset(&s->events, 0, sizeof s->events);
    free_arguments(&s->event_arguments);
    memset(&s->event_arguments, 0, sizeof s->event_arguments);
}

void scanner_free(Scanner *s) {
    if (!s) return;
    free_symbols(s);
    free_batches(s);
    free(s->code);
    for (int i = 0; i < MAX_GAPS / GAPS_AT_ONCE; i++) free(s->gaps[i]);
    free(s->fields);
    free(s->said);
    free(s->tracks);
    free(s->track_slots);
    free(s->columns.category);
    free(s->columns.name);
    free(s->columns.track);
    free(s->columns.begin_ns);
    free(s->columns.stream);
    free(s->columns.device);
    free_numbers(&s->columns.duration_ns);
    free_numbers(&s->columns.external_id);
    free_numbers(&s->columns.correlation);
    free_arguments(&s->arguments);
    free(s);
}

static int learn_keys(Scanner *s, const char **keys) {
    memset(s->key_slots, 0xff, sizeof s->key_slots);
    for (; *keys; keys++) {
        int64_t n = (int64_t)strlen(*keys);
        if (!n || s->num_keys == 255 || intern(s, *keys, n) != s->num_keys) return 0;
        uint64_t at = key_slot(*keys, n);
        while (s->key_slots[at] >= 0) at = (at + 1) & (NUM_KEY_SLOTS - 1);
        s->key_slots[at] = (int16_t)s->num_keys++;
    }
    return s->num_keys >= NUM_DENSE;
}

static int learn_categories(Scanner *s, const char **categories, const uint8_t *codes) {
    const char **each = categories;
    for (; *each; each++)
        if (intern_word(s, *each) < 0) return 0;
    s->num_codes = (int32_t)s->num_symbols;
    s->code = calloc((size_t)s->num_symbols + 1, 1);
    if (!s->code) return 0;
    for (each = categories; *each; each++, codes++) s->code[intern_word(s, *each)] = *codes;
    return 1;
}

/* `keys`: the arguments to keep, at most 255, ended by NULL. The first four are External id,
 * correlation, stream and device, which have columns of their own; up to `num_dropped` only events
 * that are given in batches keep them. `phases`: letters of the events to keep. `categories`, ended
 * by NULL, and the code of each; of `python_code` only calls of modules are kept, as `module_code`,
 * unless `with_python`. `is_raw`: complete events are given in batches like all others. */
Scanner *scanner_new(
    const char **keys,
    int32_t num_dropped,
    const char *phases,
    const char **categories,
    const uint8_t *codes,
    int python_code,
    int module_code,
    int with_python,
    int is_raw
) {
    Scanner *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->num_dropped = num_dropped;
    s->python_code = python_code;
    s->module_code = module_code;
    s->with_python = with_python;
    s->is_raw = is_raw;
    s->last_category = -1;
    for (; *phases; phases++) s->wanted_phase[(uint8_t)*phases] = 1;
    if (!take_gap(s) || grow_slots(s) != OK || !learn_keys(s, keys) || !learn_categories(s, categories, codes)) {
        scanner_free(s);
        return NULL;
    }
    return s;
}

/* Empties what is given in batches; symbols and complete events stay. */
void scanner_clear_events(Scanner *s) {
    s->events.num = 0;
    s->event_arguments.num = 0;
    /* A value that was too wide for one batch need not be for the next. */
    if (s->event_arguments.value.wide) {
        free_arguments(&s->event_arguments);
        memset(&s->event_arguments, 0, sizeof s->event_arguments);
    }
}

/* ---- putting complete events in order --------------------------------------------------- */

/* Puts a column in order into spare memory, and leaves its own as the next column's. */
#define TAKE(type, column, order, num, spare)                             \
    do {                                                                  \
        type *from = (column), *to = (spare);                             \
        if (!from) break;                                                 \
        for (int64_t i = 0; i < (num); i++) to[i] = from[(order)[i]];     \
        (spare) = from;                                                   \
        (column) = to;                                                    \
    } while (0)

/* The larger columns come first: what one leaves has room for the next. */
static void *shrink(void *spare, int64_t num, size_t size) {
    void *found = realloc(spare, ((size_t)num + 1) * size);
    return found ? found : spare;
}

/* Arguments stand in the order of their events. */
static int order_arguments(Arguments *a, const int64_t *order, int64_t num_events) {
    int64_t num = a->num, put = 0;
    int32_t *first = malloc(((size_t)num_events + 1) * sizeof *first);
    int64_t *source = malloc(((size_t)num + 1) * sizeof *source);
    void *spare = malloc(((size_t)num + 1) * sizeof(int64_t));
    if (!first || !source || !spare || num > INT32_MAX) {
        free(first);
        free(source);
        free(spare);
        return NO_MEMORY;
    }
    for (int64_t event = 0, at = 0; event <= num_events; event++) {
        while (at < num && a->event[at] < event) at++;
        first[event] = (int32_t)at;
    }
    for (int64_t i = 0; i < num_events; i++)
        for (int64_t at = first[order[i]]; at < first[order[i] + 1]; at++) source[put++] = at;
    put = 0;
    for (int64_t i = 0; i < num_events; i++)
        for (int64_t left = first[order[i] + 1] - first[order[i]]; left > 0; left--)
            a->event[put++] = (int32_t)i;
    TAKE(int64_t, a->value.wide, source, num, spare);
    spare = shrink(spare, num, sizeof(int32_t));
    TAKE(int32_t, a->value.narrow, source, num, spare);
    TAKE(uint8_t, a->key, source, num, spare);
    TAKE(uint8_t, a->type, source, num, spare);
    free(first);
    free(source);
    free(spare);
    return OK;
}

static int order_columns(Columns *c, const int64_t *order) {
    int64_t num = c->num;
    void *spare = malloc(((size_t)num + 1) * sizeof(int64_t));
    if (!spare) return NO_MEMORY;
    TAKE(int64_t, c->begin_ns, order, num, spare);
    TAKE(int64_t, c->duration_ns.wide, order, num, spare);
    TAKE(int64_t, c->external_id.wide, order, num, spare);
    TAKE(int64_t, c->correlation.wide, order, num, spare);
    spare = shrink(spare, num, sizeof(int32_t));
    TAKE(int32_t, c->duration_ns.narrow, order, num, spare);
    TAKE(int32_t, c->external_id.narrow, order, num, spare);
    TAKE(int32_t, c->correlation.narrow, order, num, spare);
    TAKE(int32_t, c->name, order, num, spare);
    TAKE(int32_t, c->track, order, num, spare);
    TAKE(int32_t, c->stream, order, num, spare);
    spare = shrink(spare, num, sizeof(int16_t));
    TAKE(int16_t, c->device, order, num, spare);
    spare = shrink(spare, num, sizeof(uint8_t));
    TAKE(uint8_t, c->category, order, num, spare);
    free(spare);
    return OK;
}

/* Puts complete events into an order: the first is `order[0]`, and so on. Then the memory of all
 * but these is given back; nothing can be fed any more. What was looked at before is not valid. */
int scanner_order(Scanner *s, const int64_t *order) {
    int64_t num = s->columns.num;
    int is_ordered = 1;
    for (int64_t i = 0; is_ordered && i < num; i++) is_ordered = order[i] == i;
    if (!is_ordered) {
        if (order_arguments(&s->arguments, order, num) != OK) return NO_MEMORY;
        if (order_columns(&s->columns, order) != OK) return NO_MEMORY;
    }
    free_symbols(s);
    free_batches(s);
    s->state = AT_END;
    return OK;
}

/* ---- looking at columns ------------------------------------------------------------------ */

/* The moments in any of the events `rows`, as stretches that do not touch: how many there are, or
 * -1 where one begins before the stretch under way. `start` and `end` have room for all. */
int64_t scanner_unite(
    const int64_t *begin_ns,
    const void *duration_ns,
    int is_wide,
    const int64_t *rows,
    int64_t num,
    int64_t *start,
    int64_t *end
) {
    const int64_t *wide = duration_ns;
    const int32_t *narrow = duration_ns;
    int64_t found = 0;
    for (int64_t i = 0; i < num; i++) {
        int64_t from = begin_ns[rows[i]];
        int64_t lasts = is_wide ? wide[rows[i]] : narrow[rows[i]];
        int64_t to = (int64_t)((uint64_t)from + (uint64_t)lasts);
        if (to <= from) continue;
        if (!found || from > end[found - 1]) {
            start[found] = from;
            end[found++] = to;
            continue;
        }
        if (from < start[found - 1]) return -1;
        if (to > end[found - 1]) end[found - 1] = to;
    }
    return found;
}

#define ADDRESS(pointer) ((int64_t)(intptr_t)(pointer))
#define NUMBERS(numbers) \
    (numbers).wide != NULL, ADDRESS((numbers).wide ? (void *)(numbers).wide : (numbers).narrow)
#define NUM_LOOKED 46

/* How many numbers `scanner_look` writes: a library of another version says another number. */
int64_t scanner_num_looked(void) { return NUM_LOOKED; }

/* What is there now, as numbers and addresses; valid until the next call. */
void scanner_look(Scanner *s, int64_t *out) {
    const int64_t found[NUM_LOOKED] = {
        s->state,
        s->error,
        s->num_skipped,
        s->num_event_lists,
        s->num_complete,
        s->num_incomplete,
        s->num_fields,
        ADDRESS(s->fields),
        s->num_symbols,
        ADDRESS(s->arena),
        s->arena_size,
        s->num_tracks,
        ADDRESS(s->tracks),
        s->events.num,
        ADDRESS(s->events.phase),
        ADDRESS(s->events.category),
        ADDRESS(s->events.name),
        ADDRESS(s->events.pid),
        ADDRESS(s->events.tid),
        ADDRESS(s->events.ts_ns),
        ADDRESS(s->events.dur_ns),
        s->event_arguments.num,
        ADDRESS(s->event_arguments.event),
        ADDRESS(s->event_arguments.key),
        ADDRESS(s->event_arguments.type),
        NUMBERS(s->event_arguments.value),
        s->columns.num,
        ADDRESS(s->columns.category),
        ADDRESS(s->columns.name),
        ADDRESS(s->columns.track),
        ADDRESS(s->columns.begin_ns),
        NUMBERS(s->columns.duration_ns),
        NUMBERS(s->columns.external_id),
        NUMBERS(s->columns.correlation),
        ADDRESS(s->columns.stream),
        ADDRESS(s->columns.device),
        s->arguments.num,
        ADDRESS(s->arguments.event),
        ADDRESS(s->arguments.key),
        ADDRESS(s->arguments.type),
        NUMBERS(s->arguments.value),
    };
    memcpy(out, found, sizeof found);
}

/* Where each symbol from `first` on begins in the arena, and how long it is. */
void scanner_symbols(Scanner *s, int64_t first, int64_t *offset, int64_t *length) {
    for (int64_t i = first; i < s->num_symbols; i++) {
        offset[i - first] = s->symbols[i].offset;
        length[i - first] = s->symbols[i].length;
    }
}
