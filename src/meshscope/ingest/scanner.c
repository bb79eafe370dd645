/* Reads the events of a Chrome-form JSON trace into columns, a buffer at a time.
 *
 * No Python in here: plain C99, loaded with ctypes where it could be compiled. `python_scanner.py`
 * does the same without it, and tests hold the two against each other.
 *
 * A feed takes whole values only: what is cut off at the end of the buffer is left for the next
 * call. Nothing recurses, every read is checked against the end, and text is never trusted: strings
 * are kept as they stand between their quotes.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
    int64_t *value;
    int64_t num, room;
} Arguments;

typedef struct {
    int64_t key; /* symbol */
    int64_t value; /* symbol, raw text */
} Field;

typedef struct {
    int state;
    int error;
    int is_list; /* the file is a list of events, without an object around it */
    int64_t num_skipped; /* events that were not wanted */
    int64_t num_event_lists;
    int32_t num_keys;
    uint8_t wanted_phase[256];
    uint8_t *skipped_category; /* by symbol, for those known at the start */
    int32_t num_category_flags;
    int32_t *slots;
    int64_t num_slots;
    Symbol *symbols;
    int64_t num_symbols, symbol_room;
    char *arena;
    int64_t arena_size, arena_room;
    Events events;
    Arguments arguments;
    Field *fields;
    int64_t num_fields, field_room;
    int32_t key_ph, key_cat, key_name, key_pid, key_tid, key_ts, key_dur, key_args;
    int32_t key_trace_events;
} Scanner;

/* ---- text ------------------------------------------------------------------------------- */

static inline const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

/* `p` is behind the opening quote; the result is at the closing one, or NULL when it is not there. */
static inline const char *find_quote(const char *p, const char *end) {
    const char *near = end - p > 16 ? p + 16 : end;
    for (; p < near; p++) {
        if (*p == '"') return p;
        if (*p == '\\') break;
    }
    /* The quote is looked for again only when it was escaped: a text full of escapes would be
     * read to its end for each of them. */
    const char *quote = memchr(p, '"', (size_t)(end - p));
    while (quote) {
        const char *escape = memchr(p, '\\', (size_t)(quote - p));
        if (!escape) return quote;
        if (end - escape < 2) return NULL;
        p = escape + 2;
        if (p > quote) quote = memchr(p, '"', (size_t)(end - p));
    }
    return NULL;
}

/* Behind the value that begins at `p`, or, with a depth, behind as many closing brackets; NULL when
 * it is cut off. */
static const char *skip_nested(const char *p, const char *end, int64_t depth, int *status) {
    *status = MORE;
    do {
        p = skip_space(p, end);
        if (p >= end) return NULL;
        char c = *p;
        if (c == '"') {
            p = find_quote(p + 1, end);
            if (!p) return NULL;
            p++;
        } else if (c == '{' || c == '[') {
            depth++;
            p++;
        } else if (c == '}' || c == ']') {
            if (depth == 0) {
                *status = BAD;
                return NULL;
            }
            depth--;
            p++;
        } else if (c == ',' || c == ':') {
            if (depth == 0) {
                *status = BAD;
                return NULL;
            }
            p++;
        } else {
            const char *begin = p;
            while (p < end && *p != ',' && *p != '}' && *p != ']' && *p != ':' && *p != '"' &&
                   *p != '{' && *p != '[' && *p != ' ' && *p != '\n' && *p != '\r' && *p != '\t')
                p++;
            if (p == begin) {
                *status = BAD;
                return NULL;
            }
            if (p >= end) return NULL;
        }
    } while (depth > 0);
    *status = OK;
    return p;
}

static inline const char *skip_value(const char *p, const char *end, int *status) {
    return skip_nested(p, end, 0, status);
}

/* ---- symbols ---------------------------------------------------------------------------- */

static inline uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ULL;
    h ^= h >> 29;
    return h;
}

static inline uint64_t hash_text(const char *p, int64_t n) {
    uint64_t h = 0x9e3779b97f4a7c15ULL ^ (uint64_t)n;
    while (n >= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = mix(h ^ word) + 0x9e3779b97f4a7c15ULL;
        p += 8;
        n -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, p, (size_t)n);
    return mix(h ^ rest);
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

static int32_t find_symbol(Scanner *s, const char *p, int64_t n) {
    uint64_t hash = hash_text(p, n);
    uint64_t at = hash & (uint64_t)(s->num_slots - 1);
    while (s->slots[at] >= 0) {
        Symbol *symbol = &s->symbols[s->slots[at]];
        if (symbol->hash == hash && symbol->length == n &&
            memcmp(s->arena + symbol->offset, p, (size_t)n) == 0)
            return s->slots[at];
        at = (at + 1) & (uint64_t)(s->num_slots - 1);
    }
    return -1;
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

/* ---- values ----------------------------------------------------------------------------- */

typedef struct {
    int type;
    int64_t value;
} Value;

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
        const char *after = skip_value(p, end, status);
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
    int64_t room = e->room ? e->room + e->room / 2 : 4096;
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

static int put_argument(Scanner *s, int32_t key, Value value) {
    Arguments *a = &s->arguments;
    if (a->num == a->room) {
        int64_t room = a->room ? a->room + a->room / 2 : 4096;
        GROW(a->event, room);
        GROW(a->key, room);
        GROW(a->type, room);
        GROW(a->value, room);
        a->room = room;
    }
    a->event[a->num] = (int32_t)s->events.num;
    a->key[a->num] = (uint8_t)key;
    a->type[a->num] = (uint8_t)value.type;
    a->value[a->num] = value.value;
    a->num++;
    return OK;
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

/* The keys of an event, told by length and letters; -1 for others. */
static inline int32_t event_key(const Scanner *s, const char *p, int64_t n) {
    if (n == 2 && p[0] == 'p' && p[1] == 'h') return s->key_ph;
    if (n == 2 && p[0] == 't' && p[1] == 's') return s->key_ts;
    if (n == 3 && memcmp(p, "cat", 3) == 0) return s->key_cat;
    if (n == 3 && memcmp(p, "pid", 3) == 0) return s->key_pid;
    if (n == 3 && memcmp(p, "tid", 3) == 0) return s->key_tid;
    if (n == 3 && memcmp(p, "dur", 3) == 0) return s->key_dur;
    if (n == 4 && memcmp(p, "name", 4) == 0) return s->key_name;
    if (n == 4 && memcmp(p, "args", 4) == 0) return s->key_args;
    return -1;
}

/* A key and its colon; the result is at the value. `*symbol` is -1 for a key nobody asked for. */
static const char *read_key(
    Scanner *s, const char *p, const char *end, int is_event, int32_t *symbol, int *status
) {
    if (*p != '"') {
        *status = BAD;
        return NULL;
    }
    const char *quote = find_quote(p + 1, end);
    *status = MORE;
    if (!quote) return NULL;
    int64_t n = quote - p - 1;
    *symbol = is_event ? event_key(s, p + 1, n) : find_symbol(s, p + 1, n);
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

static const char *read_arguments(Scanner *s, const char *p, const char *end, int *status) {
    p++;
    for (;;) {
        p = skip_space(p, end);
        *status = MORE;
        if (p >= end) return NULL;
        if (*p == ',') {
            p++;
            continue;
        }
        if (*p == '}') {
            *status = OK;
            return p + 1;
        }
        int32_t key;
        p = read_key(s, p, end, 0, &key, status);
        if (!p) return NULL;
        if (key >= 0 && key < s->num_keys) {
            Value value = {TYPE_WORD, 0};
            p = read_value(s, p, end, &value, status);
            if (!p) return NULL;
            *status = put_argument(s, key, value);
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
    int64_t first_argument;
    int is_skipped;
} Event;

/* A whole number written as a float is one: tables that wrote a trace again turn ids into these. */
static int64_t identity_of(Value value) {
    if (value.type == TYPE_INT) return value.value;
    if (value.type == TYPE_FLOAT) {
        double number;
        memcpy(&number, &value.value, 8);
        if (fabs(number) < 9007199254740992.0 && number == floor(number)) return (int64_t)number;
    }
    if (value.type == TYPE_STRING) return INT64_MIN + 2 + value.value;
    return MISSING;
}

static const char *read_member(
    Scanner *s, const char *p, const char *end, int32_t key, Event *event, int *status
) {
    if (key == s->key_args) { /* of a key that is there twice the last counts */
        s->arguments.num = event->first_argument;
        if (*p == '{') return read_arguments(s, p, end, status);
    }
    int is_known = key == s->key_ph || key == s->key_cat || key == s->key_name ||
                   key == s->key_pid || key == s->key_tid;
    if (key == s->key_ts || key == s->key_dur) {
        const char *begin = p;
        int is_text = *p == '"';
        p = skip_value(p, end, status);
        if (!p) return NULL;
        int64_t ns = is_text ? read_time(begin + 1, p - 1) : read_time(begin, p);
        if (key == s->key_ts) event->ts_ns = ns;
        else event->dur_ns = ns;
        return p;
    }
    if (!is_known) return skip_value(p, end, status);
    Value value = {TYPE_WORD, 0};
    p = read_value(s, p, end, &value, status);
    if (!p) return NULL;
    int is_text = value.type == TYPE_STRING;
    if (key == s->key_pid) event->pid = identity_of(value);
    else if (key == s->key_tid) event->tid = identity_of(value);
    else if (key == s->key_name) event->name = is_text ? (int32_t)value.value : -1;
    else if (key == s->key_cat) {
        event->category = is_text ? (int32_t)value.value : -1;
        if (is_text && event->category < s->num_category_flags &&
            s->skipped_category[event->category])
            event->is_skipped = 1;
    } else {
        event->phase = 0;
        if (is_text && s->symbols[value.value].length)
            event->phase = (uint8_t)s->arena[s->symbols[value.value].offset];
        if (is_text && !s->wanted_phase[event->phase]) event->is_skipped = 1;
    }
    return p;
}

static void put_event(Events *e, const Event *event) {
    e->phase[e->num] = (uint8_t)event->phase;
    e->category[e->num] = event->category;
    e->name[e->num] = event->name;
    e->pid[e->num] = event->pid;
    e->tid[e->num] = event->tid;
    e->ts_ns[e->num] = event->ts_ns;
    e->dur_ns[e->num] = event->dur_ns;
    e->num++;
}

/* One event; on anything but OK the columns are as they were. */
static const char *read_event(Scanner *s, const char *p, const char *end, int *status) {
    Event event = {0, -1, -1, MISSING, MISSING, MISSING, MISSING, s->arguments.num, 0};
    *status = reserve_event(&s->events);
    if (*status != OK) return NULL;
    p++;
    for (;;) {
        p = skip_space(p, end);
        *status = MORE;
        if (p >= end) break;
        if (*p == ',') {
            p++;
            continue;
        }
        if (*p == '}') {
            put_event(&s->events, &event);
            *status = OK;
            return p + 1;
        }
        int32_t key;
        p = read_key(s, p, end, 1, &key, status);
        if (!p) break;
        p = read_member(s, p, end, key, &event, status);
        if (!p) break;
        if (event.is_skipped) {
            p = skip_nested(p, end, 1, status);
            if (!p) break;
            s->num_skipped++;
            s->arguments.num = event.first_argument;
            return p;
        }
    }
    s->arguments.num = event.first_argument;
    return NULL;
}

/* ---- the file --------------------------------------------------------------------------- */

static const char *feed_events(Scanner *s, const char *p, const char *end, int *status) {
    p = skip_space(p, end);
    *status = MORE;
    if (p >= end) return NULL;
    *status = OK;
    if (*p == ',') return p + 1;
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
    const char *begin = p;
    int32_t key;
    p = read_key(s, p, end, 0, &key, status);
    if (!p) return NULL;
    if (key == s->key_trace_events && *p == '[') {
        s->state = IN_EVENTS;
        s->num_event_lists++;
        return p + 1;
    }
    const char *value = p;
    p = skip_value(p, end, status);
    if (!p) return NULL;
    const char *quote = find_quote(begin + 1, end);
    int32_t key_symbol = intern(s, begin + 1, quote - begin - 1);
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

void scanner_free(Scanner *s) {
    if (!s) return;
    free(s->slots);
    free(s->symbols);
    free(s->arena);
    free(s->skipped_category);
    free(s->fields);
    free(s->events.phase);
    free(s->events.category);
    free(s->events.name);
    free(s->events.pid);
    free(s->events.tid);
    free(s->events.ts_ns);
    free(s->events.dur_ns);
    free(s->arguments.event);
    free(s->arguments.key);
    free(s->arguments.type);
    free(s->arguments.value);
    free(s);
}

/* `keys`: the arguments to keep, at most 255, ended by NULL; `phases`: letters of the events to
 * keep; `skipped`: categories to leave out, ended by NULL. */
Scanner *scanner_new(const char **keys, const char *phases, const char **skipped) {
    Scanner *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    int is_made = grow_slots(s) == OK;
    for (; is_made && *keys; keys++) is_made = intern_word(s, *keys) == s->num_keys++;
    for (; *phases; phases++) s->wanted_phase[(uint8_t)*phases] = 1;
    s->key_ph = intern_word(s, "ph");
    s->key_cat = intern_word(s, "cat");
    s->key_name = intern_word(s, "name");
    s->key_pid = intern_word(s, "pid");
    s->key_tid = intern_word(s, "tid");
    s->key_ts = intern_word(s, "ts");
    s->key_dur = intern_word(s, "dur");
    s->key_args = intern_word(s, "args");
    s->key_trace_events = intern_word(s, "traceEvents");
    const char **each = skipped;
    for (; *each; each++) is_made = is_made && intern_word(s, *each) >= 0;
    s->num_category_flags = (int32_t)s->num_symbols;
    s->skipped_category = calloc((size_t)s->num_symbols + 1, 1);
    is_made = is_made && s->skipped_category && s->num_keys < 256 && s->key_trace_events >= 0;
    if (!is_made) {
        scanner_free(s);
        return NULL;
    }
    for (each = skipped; *each; each++)
        s->skipped_category[find_symbol(s, *each, (int64_t)strlen(*each))] = 1;
    return s;
}

/* Empties the columns of events and arguments; symbols stay. */
void scanner_clear_events(Scanner *s) {
    s->events.num = 0;
    s->arguments.num = 0;
}

#define NUM_LOOKED 22

/* How many numbers `scanner_look` writes: a library of another version says another number. */
int64_t scanner_num_looked(void) { return NUM_LOOKED; }

/* What is there now, as numbers and addresses; valid until the next call. */
void scanner_look(Scanner *s, int64_t *out) {
    const int64_t found[NUM_LOOKED] = {
        s->state,
        s->error,
        s->num_skipped,
        s->num_event_lists,
        s->events.num,
        (int64_t)(intptr_t)s->events.phase,
        (int64_t)(intptr_t)s->events.category,
        (int64_t)(intptr_t)s->events.name,
        (int64_t)(intptr_t)s->events.pid,
        (int64_t)(intptr_t)s->events.tid,
        (int64_t)(intptr_t)s->events.ts_ns,
        (int64_t)(intptr_t)s->events.dur_ns,
        s->arguments.num,
        (int64_t)(intptr_t)s->arguments.event,
        (int64_t)(intptr_t)s->arguments.key,
        (int64_t)(intptr_t)s->arguments.type,
        (int64_t)(intptr_t)s->arguments.value,
        s->num_fields,
        (int64_t)(intptr_t)s->fields,
        s->num_symbols,
        (int64_t)(intptr_t)s->arena,
        s->arena_size,
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
