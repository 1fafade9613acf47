/*
 * note.c - the record of a call.
 */
#include "note.h"

#include "hash.h"
#include "log.h"
#include "mem.h"

static struct slice put(char **at, struct slice s)
{
    struct slice copy = {*at, s.n};

    if (s.n > 0)
        memcpy(*at, s.p, s.n);
    *at += s.n;
    return copy;
}

struct note *note_new(const struct http_head *h, const struct route *r, enum config_tenant_log how,
                      struct slice own_id)
{
    char shown[512], hashed[32], *at;
    struct slice target = route_loggable_target(http_target(h), shown, sizeof(shown));
    struct slice request_id = http_value_of(h, HTTP_FIELD_X_REQUEST_ID, 128);
    struct slice task = http_value_of(h, HTTP_FIELD_LEASEGATE_TASK, 256);
    struct slice trace = http_value_of(h, HTTP_FIELD_TRACEPARENT, 64);
    struct slice tenant = {r->tenant.p, size_min(r->tenant.n, 256)};
    struct note *n;

    if (request_id.n == 0)
        request_id = own_id;
    if (how == CONFIG_TENANT_LOG_HASH && tenant.n > 0) {
        hash_stable_hex(tenant, hashed);
        tenant = (struct slice){hashed, sizeof(hashed)};
    }
    n = mem_alloc(sizeof(*n) + target.n + request_id.n + task.n + trace.n + tenant.n);
    if (n == NULL)
        return NULL;
    at = n->bytes_;
    n->method = http_method_name(h->method);
    n->target = put(&at, target);
    n->request_id = put(&at, request_id);
    n->task = put(&at, task);
    n->traceparent = put(&at, trace);
    n->tenant = put(&at, tenant);
    n->model = NULL;
    return n;
}

bool note_set_model(struct note *n, struct slice model)
{
    if (model.n == 0)
        return true;
    mem_free(n->model);
    n->model = mem_strndup(model.p, model.n);
    return n->model != NULL;
}

void note_free(struct note *n)
{
    if (n != NULL)
        mem_free(n->model);
    mem_free(n);
}

void note_text(char *to, size_t size, struct slice s)
{
    size_t n = size_min(s.n, size - 1);

    if (n > 0)
        memcpy(to, s.p, n);
    to[n] = '\0';
}

static void log_optional(struct log_line *l, const char *key, struct slice value)
{
    if (value.n > 0)
        log_str(l, key, value);
}

void note_log(const struct note *n, const struct note_end *e)
{
    struct log_line *l = log_begin(LOG_INFO, "call");

    if (l == NULL)
        return;
    if (n != NULL) {
        log_str(l, "id", n->request_id);
        log_str(l, "method", n->method);
        log_str(l, "path", n->target);
    }
    log_u64(l, "status", e->status);
    log_text(l, "reason", e->reason);
    log_text(l, "by", outcome_who_word(outcome_info(e->outcome)->who));
    log_text(l, "phase", outcome_phase_word(e->phase));
    log_optional(l, "detail", slice_of(e->detail));
    log_optional(l, "upstream", slice_of(e->upstream));
    if (n != NULL) {
        log_optional(l, "model", slice_of(n->model == NULL ? "" : n->model));
        log_optional(l, "tenant", n->tenant);
        log_optional(l, "task", n->task);
        log_optional(l, "traceparent", n->traceparent);
    }
    log_optional(l, "limit", slice_of(e->limit));
    log_optional(l, "lease", slice_of(e->lease));
    if (e->admitted_us != 0)
        log_ms(l, "wait_ms", e->admitted_us - e->began_us);
    if (e->opened_us != 0)
        log_ms(l, "dial_ms", e->opened_us - e->admitted_us);
    if (e->head_us != 0)
        log_ms(l, "first_byte_ms", e->head_us - e->began_us);
    log_ms(l, "duration_ms", e->ended_us - e->began_us);
    log_u64(l, "bytes_in", e->bytes_in);
    log_u64(l, "bytes_out", e->bytes_out);
    if (e->replayed)
        log_bool(l, "replayed", true);
    log_text(l, "client", e->client);
    log_end(l);
}
