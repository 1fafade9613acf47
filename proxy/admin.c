/*
 * admin.c - the admin listener.
 *
 * It rides on client.c like the calls do: the same strict parser, the same time limits. An exchange here is
 * answered at once, from inside on_request, so it has no state of its own.
 */
#include "admin.h"

#include "client.h"
#include "json.h"
#include "log.h"
#include "mem.h"
#include "metrics.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#define ADMIN_TICK_MS 200

struct admin {
    struct loop *loop;
    pthread_t thread;
    struct client_group group;
    struct stream_listener *listener;
    struct snapshot *snapshot;
    const struct admin_view *view;
    struct deadline tick;
};

struct answer {
    unsigned status;
    const char *type;
    struct buf body;
    bool ok; /* false: no memory */
};

static void say(struct answer *a, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void say(struct answer *a, const char *fmt, ...)
{
    char text[256];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    a->ok = a->ok && n >= 0 && buf_put(&a->body, (struct slice){text, size_min((size_t)n, sizeof(text) - 1)});
}

/* --- endpoints ---------------------------------------------------------------------------------------------------- */

static void get_healthz(struct admin *a UNUSED, struct answer *out)
{
    out->type = "application/json";
    say(out, "{\"status\":\"ok\"}\n");
}

/* Ready: calls would be served. Not ready: draining, or every call that is counted would be refused. */
static void get_readyz(struct admin *a, struct answer *out)
{
    const struct config *c = a->snapshot->config;
    const char *trouble = "";

    for (size_t i = 0; i < a->view->n_workers && trouble[0] == '\0'; i++)
        trouble = worker_trouble(a->view->workers[i]);
    out->type = "application/json";
    if (__atomic_load_n(&a->view->draining, __ATOMIC_ACQUIRE)) {
        out->status = 503;
        say(out, "{\"status\":\"draining\"}\n");
    } else if (trouble[0] != '\0' && c->n_limits > 0 && c->redis[0].on_outage == CONFIG_OUTAGE_DENY) {
        out->status = 503;
        say(out, "{\"status\":\"redis_unavailable\",\"redis\":\"%s\"}\n", trouble);
    } else {
        say(out, "{\"status\":\"ready\",\"redis\":\"%s\"}\n", trouble[0] == '\0' ? "ok" : trouble);
    }
}

static void get_metrics(struct admin *a UNUSED, struct answer *out)
{
    out->type = "text/plain; version=0.0.4; charset=utf-8";
    out->ok = metrics_write(&out->body);
}

struct endpoint {
    const char *path;
    void (*get)(struct admin *a, struct answer *out);
    bool open; /* no token: for probes that can carry none */
};

static const struct endpoint endpoints[] = {
    {"/healthz", get_healthz, true},
    {"/readyz", get_readyz, true},
    {"/metrics", get_metrics, false},
};

/* --- requests -------------------------------------------------------------------------------------------------------- */

/* In constant time: how long it takes tells nothing about where the difference is. */
static bool equal_secret(struct slice given, struct slice secret)
{
    unsigned char difference = given.n != secret.n;

    for (size_t i = 0; i < secret.n; i++)
        difference |= (unsigned char)(secret.p[i] ^ (i < given.n ? given.p[i] : 0));
    return difference == 0;
}

static bool is_allowed(const struct admin *a, const struct http_head *h)
{
    struct slice token = slice_of(a->snapshot->config->admin_token);
    const struct http_field *f = http_find(h, HTTP_FIELD_AUTHORIZATION);
    struct slice v;

    if (token.n == 0)
        return true;
    if (f == NULL)
        return false;
    v = http_value(h, f);
    if (v.n < 7 || !slice_ieq((struct slice){v.p, 7}, SLICE("Bearer ")))
        return false;
    return equal_secret((struct slice){v.p + 7, v.n - 7}, token);
}

static const struct endpoint *find_endpoint(struct slice target)
{
    target.n = slice_find(target, '?');
    for (size_t i = 0; i < ARRAY_LEN(endpoints); i++)
        if (slice_eq(target, slice_of(endpoints[i].path)))
            return &endpoints[i];
    return NULL;
}

static void refuse(struct answer *out, unsigned status, const char *message)
{
    out->status = status;
    out->type = "application/json";
    say(out, "{\"error\":\"%s\"}\n", message);
}

static void write_answer(struct client *c, struct answer *out, bool head_only)
{
    char head[512];
    bool keep = client_can_keep(c);
    int n = snprintf(
        head, sizeof(head),
        "HTTP/1.1 %u %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n%s%s\r\n",
        out->status, http_reason(out->status), out->type, out->body.n,
        out->status == 401 ? "WWW-Authenticate: Bearer\r\n" : "", keep ? "" : "Connection: close\r\n");
    struct iovec iov[2] = {{head, (size_t)n}, {out->body.p, out->body.n}};
    bool ok = out->ok && client_write(c, iov, head_only || out->body.n == 0 ? 1 : 2);

    client_finish(c, !ok ? CLIENT_DROP : keep ? CLIENT_KEEP : CLIENT_CLOSE);
}

static void *on_request(void *arg, struct client *c, const struct http_head *h)
{
    struct admin *a = arg;
    const struct endpoint *e = find_endpoint(http_target(h));
    struct answer out = {.status = 200, .ok = true};

    if (e == NULL)
        refuse(&out, 404, "no such endpoint");
    else if (h->method != HTTP_GET && h->method != HTTP_HEAD)
        refuse(&out, 405, "this endpoint takes GET only");
    else if (!e->open && !is_allowed(a, h))
        refuse(&out, 401, "send the admin token as Authorization: Bearer");
    else
        e->get(a, &out);
    write_answer(c, &out, h->method == HTTP_HEAD);
    buf_free(&out.body);
    return NULL;
}

static void on_bad_head(void *arg UNUSED, struct client *c, enum parse_error e)
{
    struct answer out = {.ok = true};

    refuse(&out, parse_error_status(e), parse_error_word(e));
    write_answer(c, &out, false);
    buf_free(&out.body);
}

static void on_head_timeout(void *arg UNUSED, struct client *c)
{
    client_finish(c, CLIENT_DROP);
}

static const struct client_ops admin_ops = {
    .on_request = on_request, .on_bad_head = on_bad_head, .on_head_timeout = on_head_timeout};

/* --- life ------------------------------------------------------------------------------------------------------------- */

static void on_accept(void *arg, struct stream *s)
{
    struct admin *a = arg;

    if (a->group.clients.length >= 256)
        stream_close(s); /* a handful of operators and scrapers is expected */
    else
        client_begin(&a->group, s);
}

struct admin *admin_new(struct snapshot *s, const struct admin_view *view, struct buf *why)
{
    struct admin *a = mem_must_zalloc(sizeof(*a));

    a->loop = loop_new(0);
    a->view = view;
    a->snapshot = snapshot_ref(s);
    client_group_init(&a->group, a->loop, &admin_ops, a);
    a->group.settings = (struct client_settings){.head_max_bytes = 16384,
                                                 .header_timeout_ms = 10000,
                                                 .keepalive_timeout_ms = 60000,
                                                 .write_timeout_ms = 30000};
    a->listener = stream_listen(a->loop, s->config->admin.host, s->config->admin.port, NULL, on_accept, a,
                                why);
    return a->listener == NULL ? NULL : a; /* NULL: the process ends with *why */
}

uint16_t admin_port(const struct admin *a)
{
    return stream_listener_port(a->listener);
}

static void on_tick(struct deadline *d)
{
    struct admin *a = container_of(d, struct admin, tick);

    log_flush();
    if (!deadline_set(a->loop, &a->tick, loop_now_ms(a->loop) + ADMIN_TICK_MS))
        WARN_ON(true);
}

static void *admin_main(void *arg)
{
    struct admin *a = arg;

    on_tick(&a->tick);
    loop_run(a->loop);
    log_thread_end();
    return NULL;
}

void admin_start(struct admin *a)
{
    deadline_init(&a->tick, on_tick);
    BUG_ON(pthread_create(&a->thread, NULL, admin_main, a) != 0);
}

struct admin_news {
    struct admin *admin;
    struct snapshot *snapshot;
};

static void reload_here(struct loop *l UNUSED, void *arg)
{
    struct admin_news *news = arg;

    snapshot_unref(news->admin->snapshot);
    news->admin->snapshot = news->snapshot;
    mem_free(news);
}

bool admin_reload(struct admin *a, struct snapshot *s)
{
    struct admin_news *news = mem_alloc(sizeof(*news));

    if (news == NULL)
        return false;
    *news = (struct admin_news){a, snapshot_ref(s)};
    if (loop_post(a->loop, reload_here, news))
        return true;
    snapshot_unref(s);
    mem_free(news);
    return false;
}

static void stop_here(struct loop *l, void *arg)
{
    struct admin *a = arg;

    deadline_cancel(l, &a->tick);
    stream_listener_close(a->listener);
    client_group_drop(&a->group);
    loop_stop(l);
}

void admin_stop(struct admin *a)
{
    if (!loop_post(a->loop, stop_here, a))
        return; /* no memory: the process ends anyway */
    pthread_join(a->thread, NULL);
    snapshot_unref(a->snapshot);
    loop_free(a->loop);
    mem_free(a);
}
