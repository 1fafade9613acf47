/*
 * resolve.c - uv_getaddrinfo behind a cache of one host.
 *
 * Owns the last good answer (one of its references) and the request in flight. A request cannot always be
 * cancelled, so it is its own block: it outlives the resolver that asked, finds its `asker` gone, and frees
 * itself.
 */
#include "resolve.h"

#include "mem.h"

#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>

#define ADDRESSES_MAX 16
#define RETRY_MS 1000 /* a name that failed is not asked for again before */

union address {
    struct sockaddr any;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
};

struct resolve_answer {
    unsigned references;
    size_t n;
    union address addresses[ADDRESSES_MAX];
};

struct question {
    uv_getaddrinfo_t request;
    struct resolve *asker; /* NULL: it was freed */
};

struct resolve {
    struct loop *loop;
    char *host;
    uint16_t port;
    bool literal;
    uint64_t interval_ms;
    uint64_t next_ms; /* not asked for again before */
    void (*on_done)(void *owner);
    void *owner;
    struct resolve_answer *answer;
    struct question *question; /* NULL: none in flight */
    const char *error;
};

size_t resolve_answer_n(const struct resolve_answer *a)
{
    return a->n;
}

const struct sockaddr *resolve_answer_at(const struct resolve_answer *a, size_t i)
{
    return &a->addresses[i].any;
}

void resolve_answer_unref(struct resolve_answer *a)
{
    if (a != NULL && --a->references == 0)
        mem_free(a);
}

static struct resolve_answer *answer_new(void)
{
    struct resolve_answer *a = mem_zalloc(sizeof(*a));

    if (a != NULL)
        a->references = 1;
    return a;
}

static size_t address_size(const struct sockaddr *a)
{
    return a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static bool literal_address(const char *host, uint16_t port, union address *out)
{
    return uv_ip4_addr(host, port, &out->in) == 0 || uv_ip6_addr(host, port, &out->in6) == 0;
}

/* The next entry of this family (or of any other) from *at on; NULL at the end. */
static const struct addrinfo *next_of(const struct addrinfo **at, int family, bool same)
{
    const struct addrinfo *a = *at;

    while (a != NULL && ((a->ai_family == family) != same || a->ai_addrlen > sizeof(union address)))
        a = a->ai_next;
    *at = a == NULL ? NULL : a->ai_next;
    return a;
}

/* In the resolver's order, the two families in turn. */
static void answer_fill(struct resolve_answer *a, const struct addrinfo *all)
{
    const struct addrinfo *ours = all, *others = all;
    int family = all->ai_family;

    while (a->n < ADDRESSES_MAX) {
        const struct addrinfo *x = next_of(&ours, family, true);
        const struct addrinfo *y = next_of(&others, family, false);

        if (x != NULL)
            memcpy(&a->addresses[a->n++], x->ai_addr, x->ai_addrlen);
        if (y != NULL && a->n < ADDRESSES_MAX)
            memcpy(&a->addresses[a->n++], y->ai_addr, y->ai_addrlen);
        if (x == NULL && y == NULL)
            break;
    }
}

static void on_answer(uv_getaddrinfo_t *request, int status, struct addrinfo *all)
{
    struct question *q = container_of(request, struct question, request);
    struct resolve *r = q->asker;
    struct resolve_answer *a = NULL;

    if (r == NULL)
        goto out;
    r->question = NULL;
    r->error = "";
    if (status == 0 && all != NULL) {
        a = answer_new();
        if (a != NULL)
            answer_fill(a, all);
    }
    if (a != NULL && a->n > 0) {
        resolve_answer_unref(r->answer);
        r->answer = a;
        r->next_ms = loop_now_ms(r->loop) + r->interval_ms;
    } else {
        resolve_answer_unref(a);
        r->error = status != 0 ? uv_strerror(status) : "no usable address";
        r->next_ms = loop_now_ms(r->loop) + RETRY_MS;
    }
    r->on_done(r->owner);
out:
    uv_freeaddrinfo(all);
    mem_free(q);
}

static void ask(struct resolve *r)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    struct question *q = mem_alloc(sizeof(*q));
    char service[8];
    int rc = UV_ENOMEM;

    snprintf(service, sizeof(service), "%u", r->port);
    if (q != NULL) {
        q->asker = r;
        rc = uv_getaddrinfo(loop_uv(r->loop), &q->request, on_answer, r->host, service, &hints);
    }
    if (rc != 0) {
        mem_free(q);
        r->error = uv_strerror(rc);
        r->next_ms = loop_now_ms(r->loop) + RETRY_MS;
        return;
    }
    r->question = q;
}

struct resolve *resolve_new(struct loop *l, const char *host, uint16_t port, uint64_t interval_ms,
                            void (*on_done)(void *owner), void *owner)
{
    struct resolve *r = mem_zalloc(sizeof(*r));
    union address literal;

    if (r == NULL)
        return NULL;
    *r = (struct resolve){
        .loop = l, .port = port, .interval_ms = interval_ms, .on_done = on_done, .owner = owner};
    r->error = "";
    r->host = mem_strndup(host, strlen(host));
    if (r->host == NULL)
        goto no_memory;
    r->literal = literal_address(host, port, &literal);
    if (r->literal) {
        r->answer = answer_new();
        if (r->answer == NULL)
            goto no_memory;
        r->answer->addresses[0] = literal;
        r->answer->n = 1;
    }
    return r;

no_memory:
    resolve_free(r);
    return NULL;
}

void resolve_free(struct resolve *r)
{
    if (r->question != NULL) {
        r->question->asker = NULL;
        (void)uv_cancel((uv_req_t *)&r->question->request); /* else it is already being worked on */
    }
    resolve_answer_unref(r->answer);
    mem_free(r->host);
    mem_free(r);
}

struct resolve_answer *resolve_get(struct resolve *r)
{
    if (!r->literal && r->question == NULL && loop_now_ms(r->loop) >= r->next_ms)
        ask(r);
    if (r->answer != NULL)
        r->answer->references++;
    return r->answer;
}

bool resolve_asking(const struct resolve *r)
{
    return r->question != NULL;
}

const char *resolve_error(const struct resolve *r)
{
    return r->error;
}

void resolve_prefer(struct resolve *r, const struct sockaddr *address)
{
    struct resolve_answer *old = r->answer, *a;
    size_t at = 0;

    while (old != NULL && at < old->n && memcmp(&old->addresses[at], address, address_size(address)) != 0)
        at++;
    if (old == NULL || at == 0 || at == old->n)
        return;
    a = answer_new(); /* answers in use never change */
    if (a == NULL)
        return;
    a->n = old->n;
    a->addresses[0] = old->addresses[at];
    memcpy(&a->addresses[1], &old->addresses[0], at * sizeof(a->addresses[0]));
    memcpy(&a->addresses[at + 1], &old->addresses[at + 1], (a->n - at - 1) * sizeof(a->addresses[0]));
    r->answer = a;
    resolve_answer_unref(old);
}
