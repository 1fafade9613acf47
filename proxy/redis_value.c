/*
 * redis_value.c - the replies of Redis: hiredis' reader, building values of our own.
 *
 * A reader owns the one reply that it has given out, or is building: its elements are built in place, one
 * array an array, and cleared before the next reply is begun. hiredis is asked for the wire format alone;
 * its own reply objects, with an allocation each, never come to be.
 */
#include "redis_value.h"

#include "mem.h"

#include <hiredis/read.h>

#include <string.h>

#define STRING_MAX_BYTES (1u << 20) /* longer than any reply of ours: no RESP that we asked for */
#define ELEMENTS_MAX 65536u
#define DEPTH_MAX 7 /* arrays in arrays: the bound of hiredis 0.14; 1.1 and newer have none of their own */

struct redis_value {
    enum redis_type type;
    union {
        int64_t number;
        struct {
            char *p; /* owned */
            size_t n;
        } text;
        struct {
            struct redis_value *p; /* owned; NULL when n is 0 */
            size_t n;
        } items;
    } u;
};

struct redis_reader {
    redisReader *hiredis;
    struct redis_value root; /* of the reply given out last, or being read; elements are built in place */
};

static struct redis_value *value_slot(const redisReadTask *t, enum redis_type type)
{
    struct redis_value *v;

    if (t->parent == NULL)
        v = &((struct redis_reader *)t->privdata)->root;
    else
        v = &((struct redis_value *)t->parent->obj)->u.items.p[t->idx];
    v->type = type;
    return v;
}

static void *value_new_string(const redisReadTask *t, char *bytes, size_t n)
{
    struct redis_value *v;
    char *copy = n > STRING_MAX_BYTES ? NULL : mem_strndup(bytes, n);

    if (copy == NULL)
        return NULL;
    v = value_slot(t, t->type == REDIS_REPLY_ERROR ? REDIS_TYPE_ERROR : REDIS_TYPE_STRING);
    v->u.text.p = copy;
    v->u.text.n = n;
    return v;
}

static void *value_new_array_of(const redisReadTask *t, size_t n)
{
    struct redis_value *v, *items = NULL;
    unsigned depth = 0;

    for (const redisReadTask *at = t->parent; at != NULL; at = at->parent)
        if (++depth > DEPTH_MAX)
            return NULL;
    if (n > ELEMENTS_MAX)
        return NULL;
    if (n > 0) {
        items = mem_zalloc(n * sizeof(*items)); /* all REDIS_TYPE_NIL: safe to free half-read */
        if (items == NULL)
            return NULL;
    }
    v = value_slot(t, REDIS_TYPE_ARRAY);
    v->u.items.p = items;
    v->u.items.n = n;
    return v;
}

/* hiredis 1.x (known by the RESP3 types) counts elements in size_t, 0.14 in int. */
#ifdef REDIS_REPLY_MAP
#define value_new_array value_new_array_of
#else
static void *value_new_array(const redisReadTask *t, int n)
{
    return n < 0 ? NULL : value_new_array_of(t, (size_t)n);
}
#endif

static void *value_new_integer(const redisReadTask *t, long long number)
{
    struct redis_value *v = value_slot(t, REDIS_TYPE_INT);

    v->u.number = number;
    return v;
}

static void *value_new_nil(const redisReadTask *t)
{
    return value_slot(t, REDIS_TYPE_NIL);
}

/* Frees what v owns. Its depth is bounded by DEPTH_MAX. */
static void value_clear(struct redis_value *v)
{
    if (v->type == REDIS_TYPE_STRING || v->type == REDIS_TYPE_ERROR) {
        mem_free(v->u.text.p);
    } else if (v->type == REDIS_TYPE_ARRAY) {
        for (size_t i = 0; i < v->u.items.n; i++)
            value_clear(&v->u.items.p[i]);
        mem_free(v->u.items.p);
    }
    v->type = REDIS_TYPE_NIL;
}

/* hiredis gives its root back on errors. The root is ours and cleared by redis_reader_next and _free. */
static void value_free(void *v)
{
    (void)v;
}

static redisReplyObjectFunctions value_functions = {
    .createString = value_new_string,
    .createArray = value_new_array,
    .createInteger = value_new_integer,
    .createNil = value_new_nil,
    .freeObject = value_free,
};

struct redis_reader *redis_reader_new(void)
{
    struct redis_reader *rd = mem_zalloc(sizeof(*rd));

    if (rd == NULL)
        return NULL;
    rd->hiredis = redisReaderCreateWithFunctions(&value_functions);
    if (rd->hiredis == NULL) {
        mem_free(rd);
        return NULL;
    }
    rd->hiredis->privdata = rd;
    return rd;
}

void redis_reader_free(struct redis_reader *rd)
{
    if (rd == NULL)
        return;
    redisReaderFree(rd->hiredis);
    value_clear(&rd->root);
    mem_free(rd);
}

bool redis_reader_feed(struct redis_reader *rd, const char *bytes, size_t n)
{
    return redisReaderFeed(rd->hiredis, bytes, n) == 0;
}

const char *redis_reader_trouble(const struct redis_reader *rd)
{
    return rd->hiredis->err == REDIS_ERR_OOM ? "no_memory" : "protocol";
}

const struct redis_value *redis_reader_next(struct redis_reader *rd, bool *failed)
{
    void *reply = NULL;

    /* A root that is half read stays: its elements arrive with a later feed. */
    if (rd->hiredis->ridx < 0)
        value_clear(&rd->root);
    *failed = redisReaderGetReply(rd->hiredis, &reply) != 0;
    if (*failed || reply == NULL)
        return NULL;
    /* A RESP3 type, for which hiredis 1.x invents a pointer: never asked for. */
    *failed = reply != &rd->root;
    return *failed ? NULL : &rd->root;
}

enum redis_type redis_value_type(const struct redis_value *v)
{
    return v->type;
}

int64_t redis_value_int(const struct redis_value *v)
{
    BUG_ON(v->type != REDIS_TYPE_INT);
    return v->u.number;
}

struct slice redis_value_str(const struct redis_value *v)
{
    BUG_ON(v->type != REDIS_TYPE_STRING && v->type != REDIS_TYPE_ERROR);
    return (struct slice){v->u.text.p, v->u.text.n};
}

size_t redis_value_count(const struct redis_value *v)
{
    BUG_ON(v->type != REDIS_TYPE_ARRAY);
    return v->u.items.n;
}

const struct redis_value *redis_value_at(const struct redis_value *v, size_t i)
{
    BUG_ON(v->type != REDIS_TYPE_ARRAY || i >= v->u.items.n);
    return &v->u.items.p[i];
}

/*
 * Redis 6: "ERR Error running script (call to f_…): @user_script:12: WRONGTYPE Operation …", or ": -READONLY
 * You …".
 */
bool redis_value_is_error(const struct redis_value *v, const char *code)
{
    size_t n = strlen(code);
    const char *at;

    if (v->type != REDIS_TYPE_ERROR)
        return false;
    at = v->u.text.p; /* ended by NUL */
    if (strncmp(at, code, n) == 0)
        return true;
    if (strncmp(at, "ERR Error running script", 24) != 0)
        return false;
    while ((at = strstr(at, ": ")) != NULL) {
        at += 2;
        if (strncmp(at + (*at == '-'), code, n) == 0)
            return true;
    }
    return false;
}
