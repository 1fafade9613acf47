/*
 * config.h - the configuration as the rest of the program sees it: one
 * immutable snapshot, checked as a whole, counted by its users.
 *
 * A file is read into a snapshot or into a list of errors, never into half of
 * each. A call keeps the snapshot under which it began until it ends; SIGHUP
 * makes another one. Nothing in a snapshot is ever written after config_load,
 * so any thread may read it without a lock; only the reference count moves.
 *
 * All strings are set ("" stands for nothing) and, like all arrays, live in
 * the snapshot's own memory: they go when the last reference goes.
 */
#ifndef LG_CONFIG_H
#define LG_CONFIG_H

#include "base.h"
#include "buf.h"
#include "str.h"

#include <stdatomic.h>

enum config_api { CONFIG_API_OPENAI, CONFIG_API_ANTHROPIC, CONFIG_API_GEMINI };
enum config_outage { CONFIG_OUTAGE_DENY, CONFIG_OUTAGE_ALLOW };
enum config_client_gone { CONFIG_GONE_ABORT, CONFIG_GONE_DRAIN };
enum config_half_close { CONFIG_HALF_ABORT, CONFIG_HALF_PROBE, CONFIG_HALF_SERVE };
enum config_tenant_from { CONFIG_TENANT_NONE, CONFIG_TENANT_HEADER, CONFIG_TENANT_KEY };
enum config_tenant_log { CONFIG_TENANT_LOG_PLAIN, CONFIG_TENANT_LOG_HASH };
enum config_log_format { CONFIG_LOG_JSON, CONFIG_LOG_LOGFMT };
enum config_redis_kind { CONFIG_REDIS_TCP, CONFIG_REDIS_UNIX, CONFIG_REDIS_EMBEDDED };

#define CONFIG_HEADERS_MAX 32    /* that an upstream's section may set */
#define CONFIG_UNIX_PATH_MAX 107 /* bytes of a unix socket's path, without its NUL (sockaddr_un) */

/* host and port as written; port 0 on a listener means any free one */
struct config_address {
    char *text; /* as in the file, for messages */
    char *host; /* IPv4 or IPv6 address without brackets; "" means all addresses */
    uint16_t port;
};

struct config_tls { /* empty strings: not set */
    char *cert;
    char *key;
    char *ca; /* listener: whose client certificates are asked for; else: trusted instead of the system's */
    bool verify;
    unsigned line; /* in the file, of the section that names them: for messages of those who load them */
};

struct config_listen {
    struct config_address address;
    struct config_tls tls; /* cert set: a TLS listener */
    enum config_half_close half_close;
};

struct config_redis {
    char *name; /* "default" where the section has none */
    char *url;  /* password masked, for messages */
    enum config_redis_kind kind;
    char *host; /* TCP */
    uint16_t port;
    char *path; /* unix socket; of an `embedded` one set at boot by config_set_embedded_path */
    bool use_tls;
    struct config_tls tls;
    char *user; /* "" : none */
    char *password;
    unsigned db;
    uint64_t timeout_ms;
    enum config_outage on_outage;
    char *prefix;
};

struct config_field { /* a header set on every forwarded call */
    char *name;
    char *value; /* "": nothing is set */
};

struct config_upstream {
    char *name;
    unsigned index; /* position in config.upstreams */
    char *url;      /* without user info, for messages */
    bool use_tls;
    char *host; /* without brackets */
    uint16_t port;
    char *authority;   /* the Host field that is sent: host, and the port where it is not the scheme's own */
    char *path_prefix; /* of the URL, no slash at the end; "" mostly */
    bool pass_host;    /* the client's Host goes on unchanged (signed requests) */
    enum config_api api;
    struct config_tls tls;
    struct config_field *headers;
    size_t n_headers;
    uint64_t connect_timeout_ms, first_byte_timeout_ms, idle_timeout_ms, send_timeout_ms;
    uint64_t total_timeout_ms; /* 0: none */
    enum config_client_gone on_client_gone;
    uint64_t drain_max_ms, done_grace_ms, release_delay_ms, abort_delay_ms;
    bool replay_stale;
    unsigned pool_idle_max;        /* kept idle per thread */
    uint64_t pool_idle_timeout_ms; /* an idle connection older than this is closed */
    uint64_t pool_max_age_ms;      /* a connection older than this is not used again */
    uint64_t resolve_interval_ms;
};

struct config_route {
    char *prefix;
    struct config_upstream *upstream;
};

struct config_override {
    char *value; /* of the only `per` word; a model in small letters */
    uint32_t concurrency;
};

struct config_limit {
    char *name;
    unsigned index; /* position in config.limits */
    char **models;  /* globs, in small letters; none: any call, also one without a model */
    size_t n_models;
    char **tenants; /* globs; none: any */
    size_t n_tenants;
    char **upstreams; /* names; none: any */
    size_t n_upstreams;
    bool per_model, per_tenant; /* one scope a value */
    uint32_t concurrency;
    struct config_override *overrides;
    size_t n_overrides;
};

struct config_tenant_map { /* a tenant as it comes (header value or key) -> the name it is counted under */
    char *from;
    char *to;
};

struct config_tenant {
    enum config_tenant_from from;
    char *header; /* lower case */
    struct config_tenant_map *map;
    size_t n_map;
    enum config_tenant_log log;
};

struct config_log {
    enum config_log_format format;
    bool calls; /* one line a call */
    int level;  /* enum log_level */
    char *file; /* "": standard error */
};

struct config {
    char *path; /* the file it was read from */
    struct config_listen *listens;
    size_t n_listens;
    struct config_address admin;
    bool has_admin;
    char *admin_token; /* "": none */
    unsigned workers;  /* never 0 here */
    struct config_redis *redis;
    size_t n_redis; /* 1: several sections are refused in this version */
    uint64_t heartbeat_ms, ttl_ms;
    bool strict;
    struct config_upstream *upstreams;
    size_t n_upstreams;
    struct config_route *routes; /* longest prefix first */
    size_t n_routes;
    struct config_tenant tenant;
    struct config_limit *limits;
    size_t n_limits;
    bool any_limit_needs_model;
    char *model_header; /* lower case; a request header by which trusted workers name the model; "": none */
    struct config_log log;
    /* limits on what clients may send and hold */
    uint64_t head_max_bytes, body_max_bytes, body_scan_max_bytes, body_memory_bytes;
    uint64_t header_timeout_ms, body_timeout_ms, keepalive_timeout_ms, write_timeout_ms, handshake_timeout_ms;
    uint64_t drain_timeout_ms, min_drain_ms;
    unsigned max_connections; /* of clients, per thread */
    /* private */
    atomic_uint references_;
    struct config_block *blocks_; /* all memory of this snapshot, this struct included */
};

/*
 * Reads and checks a file. On success *out has one reference. On failure
 * *errors holds one line an error, `FILE:LINE: what is wrong and what to do`,
 * all of them in one run, and false is returned. errors is the caller's to buf_free in both cases
 * (it may hold warnings on success). Running out of memory is such an error, too.
 * Main thread only: libConfuse keeps its state in globals, and the environment is read.
 */
MUST_CHECK bool config_load(const char *path, struct config **out, struct buf *errors);

struct config *config_ref(struct config *c);
/* The last one frees it; callable from any thread. */
void config_unref(struct config *c);

/*
 * Only between config_load and the first sharing of the snapshot: where the private Redis listens. The path
 * must fit a sockaddr_un (CONFIG_UNIX_PATH_MAX bytes). Needs no memory. A no-op where no redis is `embedded`.
 */
void config_set_embedded_path(struct config *c, const char *path);

/* Writes the whole snapshot in the file's own syntax, secrets replaced by "***". False: no memory. */
MUST_CHECK bool config_dump(const struct config *c, struct buf *out);

/* One row an option, for the check of docs and example against the code (make lint). */
struct config_option_row {
    const char *section; /* "" : top level */
    const char *name;
    const char *type;         /* a word, or the words to choose from: `abort|drain` */
    const char *default_text; /* "required": there is none */
    const char *help;
    bool reloadable;
    /* private to config/ (config_parts.h) */
    uint8_t section_, type_, flags_;
    size_t at_; /* of the field in the struct of its section */
    uint64_t min_, max_;
};
const struct config_option_row *config_options(size_t *n);

#endif
