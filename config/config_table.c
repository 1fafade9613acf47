/*
 * config_table.c - every option and every section there is: name, type, field,
 * bounds, default, help. The one place to touch for a new option.
 *
 * Parse, dump, the reference in README.md and the check of proxy.conf.example
 * all go by these rows; config_value.c knows the types.
 */
#include "config_parts.h"

#include "log.h"

_Static_assert(LOG_ERROR == 0 && LOG_WARN == 1 && LOG_INFO == 2 && LOG_DEBUG == 3, "the words of `level`");

#define SECOND UINT64_C(1000)
#define HOUR (3600 * SECOND)
#define DAY (24 * HOUR)
#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

#define NOWHERE SIZE_MAX
#define TOP(field) offsetof(struct config, field)
#define LISTEN(field) offsetof(struct config_listen, field)
#define REDIS(field) offsetof(struct config_redis, field)
#define UPSTREAM(field) offsetof(struct config_upstream, field)
#define LIMIT(field) offsetof(struct config_limit, field)

/* R(section, name, type, type as told, field, min, max, flags, default, help) */
#define R(s, name_, kind, told, field, least, most, flag, fallback, help_)                                   \
    {                                                                                                        \
        .section = SECTION_NAME_##s, .name = name_, .type = told, .default_text = fallback,                  \
        .reloadable = OPTION_##flag != OPTION_BOOT, .help = help_, .section_ = SECTION_##s,                  \
        .type_ = TYPE_##kind, .flags_ = OPTION_##flag, .at_ = field, .min_ = least, .max_ = most             \
    }

#define SECTION_NAME_TOP ""
#define SECTION_NAME_LISTEN "listen"
#define SECTION_NAME_ADMIN "admin"
#define SECTION_NAME_CLIENT "client"
#define SECTION_NAME_REDIS "redis"
#define SECTION_NAME_LEASE "lease"
#define SECTION_NAME_UPSTREAM "upstream"
#define SECTION_NAME_HEADER "header"
#define SECTION_NAME_ROUTE "route"
#define SECTION_NAME_TENANT "tenant"
#define SECTION_NAME_MAP "map"
#define SECTION_NAME_LIMIT "limit"
#define SECTION_NAME_OVERRIDE "override"
#define SECTION_NAME_LOG "log"

static const struct config_section_row sections[SECTION_COUNT] = {
    [SECTION_TOP] = {SECTION_NAME_TOP, SECTION_TOP, TITLE_NONE, false},
    [SECTION_LISTEN] = {SECTION_NAME_LISTEN, SECTION_TOP, TITLE_WANTED, true},
    [SECTION_ADMIN] = {SECTION_NAME_ADMIN, SECTION_TOP, TITLE_WANTED, false},
    [SECTION_CLIENT] = {SECTION_NAME_CLIENT, SECTION_TOP, TITLE_NONE, false},
    [SECTION_REDIS] = {SECTION_NAME_REDIS, SECTION_TOP, TITLE_EITHER, true},
    [SECTION_LEASE] = {SECTION_NAME_LEASE, SECTION_TOP, TITLE_NONE, false},
    [SECTION_UPSTREAM] = {SECTION_NAME_UPSTREAM, SECTION_TOP, TITLE_WANTED, true},
    [SECTION_HEADER] = {SECTION_NAME_HEADER, SECTION_UPSTREAM, TITLE_WANTED, true},
    [SECTION_ROUTE] = {SECTION_NAME_ROUTE, SECTION_TOP, TITLE_WANTED, true},
    [SECTION_TENANT] = {SECTION_NAME_TENANT, SECTION_TOP, TITLE_NONE, false},
    [SECTION_MAP] = {SECTION_NAME_MAP, SECTION_TENANT, TITLE_WANTED, true},
    [SECTION_LIMIT] = {SECTION_NAME_LIMIT, SECTION_TOP, TITLE_WANTED, true},
    [SECTION_OVERRIDE] = {SECTION_NAME_OVERRIDE, SECTION_LIMIT, TITLE_WANTED, true},
    [SECTION_LOG] = {SECTION_NAME_LOG, SECTION_TOP, TITLE_NONE, false},
};

/* clang-format off */
static const struct config_option_row options[] = {
    R(TOP, "workers", COUNT, "count", TOP(workers), 0, 256, BOOT, "0",
      "event-loop threads; 0: one per core"),
    R(TOP, "drain_timeout", DURATION, "duration", TOP(drain_timeout_ms), 0, DAY, NONE, "600s",
      "after SIGTERM calls may go on so long, then they are ended"),
    R(TOP, "min_drain", DURATION, "duration", TOP(min_drain_ms), 0, HOUR, NONE, "0s",
      "after SIGTERM the process lives at least so long, so that load balancers notice"),

    R(LISTEN, "tls_cert", FILE, "file", LISTEN(tls.cert), 0, 0, NONE, "",
      "certificate chain (PEM); set: this listener speaks TLS"),
    R(LISTEN, "tls_key", FILE, "file", LISTEN(tls.key), 0, 0, NONE, "",
      "private key of tls_cert (PEM)"),
    R(LISTEN, "client_ca", FILE, "file", LISTEN(tls.ca), 0, 0, NONE, "",
      "clients must show a certificate signed by one of these (PEM)"),
    R(LISTEN, "half_close", WORD, "abort|probe|serve", LISTEN(half_close), 0, 0, NONE, "abort",
      "what a client's FIN means: the call was given up; ask first; go on"),

    R(ADMIN, "token", SECRET, "secret", TOP(admin_token), 0, 0, NONE, "",
      "bearer token for the admin API; required where it is not on loopback"),

    R(CLIENT, "head_max", SIZE, "size", TOP(head_max_bytes), 1 * KIB, 1 * MIB, NONE, "64k",
      "request line and headers together; more is a 431"),
    R(CLIENT, "body_max", SIZE, "size", TOP(body_max_bytes), 1 * KIB, 1024 * GIB, NONE, "512m",
      "one request body; more is a 413"),
    R(CLIENT, "body_scan_max", SIZE, "size", TOP(body_scan_max_bytes), 1 * KIB, 4 * GIB, NONE, "64m",
      "so far into a body the model is looked for"),
    R(CLIENT, "body_memory", SIZE, "size", TOP(body_memory_bytes), 64 * KIB, 1024 * GIB, NONE, "256m",
      "all bodies together that wait for admission"),
    R(CLIENT, "header_timeout", DURATION, "duration", TOP(header_timeout_ms), 1, HOUR, NONE, "20s",
      "from the first byte of a request to the end of its headers"),
    R(CLIENT, "body_timeout", DURATION, "duration", TOP(body_timeout_ms), 1, DAY, NONE, "60s",
      "silence within a request body"),
    R(CLIENT, "keepalive_timeout", DURATION, "duration", TOP(keepalive_timeout_ms), 1, DAY, NONE, "75s",
      "silence between two requests of a connection"),
    R(CLIENT, "write_timeout", DURATION, "duration", TOP(write_timeout_ms), 1, DAY, NONE, "60s",
      "a client that takes no byte of what waits for it"),
    R(CLIENT, "handshake_timeout", DURATION, "duration", TOP(handshake_timeout_ms), 1, HOUR, NONE, "10s",
      "TLS handshake of a client"),
    R(CLIENT, "max_connections", COUNT, "count", TOP(max_connections), 1, 1000000, NONE, "20000",
      "client connections per thread"),
    R(CLIENT, "model_header", FIELD_NAME, "header name", TOP(model_header), 0, 0, NONE, "",
      "a request header by which trusted workers name the model; empty: none"),

    R(REDIS, "url", REDIS_URL, "url", NOWHERE, 0, 0, NONE, "embedded",
      "redis://, rediss://, unix:// or embedded: a private redis-server"),
    R(REDIS, "timeout", DURATION, "duration", REDIS(timeout_ms), 1, 60 * SECOND, NONE, "250ms",
      "deadline of every command; less than ttl"),
    R(REDIS, "on_outage", WORD, "deny|allow", REDIS(on_outage), 0, 0, NONE, "deny",
      "new calls while Redis is away: 429, or through uncounted"),
    R(REDIS, "prefix", PREFIX, "text", REDIS(prefix), 0, 0, NONE, "lg1",
      "start of every key; installations that share limits share it"),
    R(REDIS, "tls_ca", FILE, "file", REDIS(tls.ca), 0, 0, NONE, "",
      "rediss: trust these instead of the system's (PEM)"),
    R(REDIS, "tls_cert", FILE, "file", REDIS(tls.cert), 0, 0, NONE, "",
      "rediss: certificate shown to Redis (PEM)"),
    R(REDIS, "tls_key", FILE, "file", REDIS(tls.key), 0, 0, NONE, "",
      "rediss: private key of tls_cert (PEM)"),
    R(REDIS, "tls_verify", BOOL, "yes/no", REDIS(tls.verify), 0, 0, NONE, "true",
      "rediss: check the server's certificate and name"),

    R(LEASE, "heartbeat", DURATION, "duration", TOP(heartbeat_ms), 10, HOUR, NONE, "2s",
      "a running call renews its slot so often"),
    R(LEASE, "ttl", DURATION, "duration", TOP(ttl_ms), 20, DAY, NONE, "6s",
      "a slot not renewed for so long may be taken by others; at least 2 heartbeats"),
    R(LEASE, "strict", BOOL, "yes/no", TOP(strict), 0, 0, NONE, "false",
      "end a call whose slot was lost, rather than count over the limit"),
    R(LEASE, "reuse", DURATION, "duration", NOWHERE, 0, HOUR, LATER, "0ms",
      "keep a freed slot for the next local call"),

    R(UPSTREAM, "url", UPSTREAM_URL, "url", NOWHERE, 0, 0, REQUIRED, "required",
      "http:// or https://, host, port, path that is put before the client's"),
    R(UPSTREAM, "api", WORD, "openai|anthropic|gemini", UPSTREAM(api), 0, 0, NONE, "openai",
      "shape of error bodies, and where the model stands"),
    R(UPSTREAM, "pass_host", BOOL, "yes/no", UPSTREAM(pass_host), 0, 0, NONE, "false",
      "the client's Host goes on unchanged (signed requests)"),
    R(UPSTREAM, "tls_ca", FILE, "file", UPSTREAM(tls.ca), 0, 0, NONE, "",
      "https: trust these instead of the system's (PEM)"),
    R(UPSTREAM, "tls_cert", FILE, "file", UPSTREAM(tls.cert), 0, 0, NONE, "",
      "https: certificate shown to the upstream (PEM)"),
    R(UPSTREAM, "tls_key", FILE, "file", UPSTREAM(tls.key), 0, 0, NONE, "",
      "https: private key of tls_cert (PEM)"),
    R(UPSTREAM, "tls_verify", BOOL, "yes/no", UPSTREAM(tls.verify), 0, 0, NONE, "true",
      "https: check the upstream's certificate and name"),
    R(UPSTREAM, "connect_timeout", DURATION, "duration", UPSTREAM(connect_timeout_ms), 1, HOUR, NONE, "5s",
      "name lookup, connection and TLS handshake"),
    R(UPSTREAM, "send_timeout", DURATION, "duration", UPSTREAM(send_timeout_ms), 1, DAY, NONE, "60s",
      "an upstream that takes no byte of what waits for it"),
    R(UPSTREAM, "first_byte_timeout", DURATION, "duration", UPSTREAM(first_byte_timeout_ms), 1, DAY, NONE,
      "600s",
      "from the request's end to the response's first byte"),
    R(UPSTREAM, "idle_timeout", DURATION, "duration", UPSTREAM(idle_timeout_ms), 1, DAY, NONE, "600s",
      "silence within a response"),
    R(UPSTREAM, "total_timeout", DURATION, "duration", UPSTREAM(total_timeout_ms), 0, 30 * DAY, NONE, "0s",
      "a whole call, from its first byte to its end; 0: as long as it takes"),
    R(UPSTREAM, "on_client_gone", WORD, "abort|drain", UPSTREAM(on_client_gone), 0, 0, NONE, "abort",
      "close the upstream connection, or read the response to its end under the same slot"),
    R(UPSTREAM, "drain_max", DURATION, "duration", UPSTREAM(drain_max_ms), 1, DAY, NONE, "600s",
      "on_client_gone = drain: at most so long"),
    R(UPSTREAM, "done_grace", DURATION, "duration", UPSTREAM(done_grace_ms), 0, HOUR, NONE, "2s",
      "after the stream's terminator the upstream may take so long to end the response"),
    R(UPSTREAM, "release_delay", DURATION, "duration", UPSTREAM(release_delay_ms), 0, HOUR, NONE, "0ms",
      "keep the slot so long after a complete response"),
    R(UPSTREAM, "abort_delay", DURATION, "duration", UPSTREAM(abort_delay_ms), 0, HOUR, NONE, "0ms",
      "keep the slot so long after a call that was cut"),
    R(UPSTREAM, "replay_stale", BOOL, "yes/no", UPSTREAM(replay_stale), 0, 0, NONE, "false",
      "send a call once more where an idle connection ended before any response byte"),
    R(UPSTREAM, "pool_idle", COUNT, "count", UPSTREAM(pool_idle_max), 0, 65536, NONE, "256",
      "connections kept idle per thread"),
    R(UPSTREAM, "pool_idle_timeout", DURATION, "duration", UPSTREAM(pool_idle_timeout_ms), 1, DAY, NONE,
      "55s",
      "close a connection idle for so long; less than the upstream's own time"),
    R(UPSTREAM, "pool_max_age", DURATION, "duration", UPSTREAM(pool_max_age_ms), 1, 30 * DAY, NONE, "600s",
      "a connection older than this takes no further call"),
    R(UPSTREAM, "resolve_interval", DURATION, "duration", UPSTREAM(resolve_interval_ms), 1, DAY, NONE, "30s",
      "look the host's name up again after so long"),

    R(HEADER, "value", FIELD_VALUE, "secret", offsetof(struct config_field, value), 0, 0, NONE, "",
      "replaces this header of every forwarded call; empty: the client's own goes on"),

    R(ROUTE, "upstream", UPSTREAM_REF, "name", offsetof(struct config_route, upstream), 0, 0, REQUIRED,
      "required",
      "where calls whose path begins so go; the longest prefix wins"),

    R(TENANT, "from", TENANT_FROM, "none|key|header:NAME", TOP(tenant), 0, 0, NONE, "none",
      "who a call is for: nobody, the hash of its API key, or a header's value"),
    R(TENANT, "log", WORD, "plain|hash", TOP(tenant.log), 0, 0, NONE, "plain",
      "how tenants appear in logs"),

    R(MAP, "to", TEXT, "text", offsetof(struct config_tenant_map, to), 0, 0, REQUIRED, "required",
      "the tenant that this header value or key is counted as"),

    R(LIMIT, "concurrency", COUNT, "count", LIMIT(concurrency), 0, 1000000, REQUIRED, "required",
      "calls in flight at once; 0: nothing enters, running calls go on"),
    R(LIMIT, "model", GLOBS, "list", LIMIT(models), 0, 0, NONE, "",
      "counts calls for these models (* stands for anything); empty: all calls"),
    R(LIMIT, "tenant", GLOBS, "list", LIMIT(tenants), 0, 0, NONE, "",
      "counts calls of these tenants (* stands for anything); empty: all"),
    R(LIMIT, "upstream", NAMES, "list", LIMIT(upstreams), 0, 0, NONE, "",
      "counts calls to these upstreams; empty: all"),
    R(LIMIT, "per", PER, "list", NOWHERE, 0, 0, NONE, "",
      "one count each \"tenant\", \"model\" or pair of both; empty: one count"),
    R(LIMIT, "redis", TEXT, "name", NOWHERE, 0, 0, LATER, "",
      "the redis section that counts it"),
    R(LIMIT, "wait", DURATION, "duration", NOWHERE, 0, HOUR, LATER, "0s",
      "a call that finds no slot waits so long"),
    R(LIMIT, "queue", COUNT, "count", NOWHERE, 0, 1000000, LATER, "0",
      "calls that may wait at once"),
    R(LIMIT, "shards", COUNT, "count", NOWHERE, 1, 1024, LATER, "1",
      "Redis keys that the count is spread over"),

    R(OVERRIDE, "concurrency", COUNT, "count", offsetof(struct config_override, concurrency), 0, 1000000,
      REQUIRED, "required",
      "instead of the limit's own, for this value of its `per` word"),

    R(LOG, "format", WORD, "json|logfmt", TOP(log.format), 0, 0, NONE, "json",
      "shape of a line"),
    R(LOG, "level", WORD, "error|warn|info|debug", TOP(log.level), 0, 0, NONE, "info",
      "what is written: this and what is worse"),
    R(LOG, "calls", BOOL, "yes/no", TOP(log.calls), 0, 0, NONE, "true",
      "one line a call"),
    R(LOG, "file", TEXT, "text", TOP(log.file), 0, 0, NONE, "",
      "append here; empty: standard error"),
};
/* clang-format on */

const struct config_option_row *config_options(size_t *n)
{
    *n = ARRAY_LEN(options);
    return options;
}

const struct config_option_row *config_option_find(enum config_section s, const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if (options[i].section_ == s && strcmp(options[i].name, name) == 0)
            return &options[i];
    return NULL;
}

const struct config_section_row *config_section_row(enum config_section s)
{
    return &sections[s];
}

enum config_section config_section_find(const char *name)
{
    for (size_t i = SECTION_TOP + 1; i < SECTION_COUNT; i++)
        if (strcmp(sections[i].name, name) == 0)
            return (enum config_section)i;
    return SECTION_COUNT;
}
