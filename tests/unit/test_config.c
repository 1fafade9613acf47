/*
 * test_config.c - the configuration: what is read, what is refused and with which words and line, that all of
 * it comes in one run, that the shipped files load, that no allocation failure does harm.
 *
 * Files are written below a directory of our own; TLS files only have to be readable here.
 */
#include "config.h"
#include "mem.h"

#include <fcntl.h>
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char directory[] = "/tmp/leasegate-config-XXXXXX";
static char file[64];

static const char good[] = "listen \"127.0.0.1:8080\" {}\n"
                           "upstream \"llm\" { url = \"http://127.0.0.1:9099\" }\n"
                           "route \"/\" { upstream = \"llm\" }\n"
                           "limit \"all\" { concurrency = 5 }\n";
#define GOOD_LINES 4

static void write_file(const char *text, size_t n)
{
    FILE *f = fopen(file, "w");

    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* Loads text; what it says comes in *said with the path cut off each line, the caller's to buf_free. */
static struct config *load(const char *text, struct buf *said)
{
    struct config *c;
    struct buf errors = {0};
    size_t n = strlen(file);
    char *line, *rest;

    write_file(text, strlen(text));
    if (!config_load(file, &c, &errors))
        assert_null(c);
    assert_true(buf_put(&errors, (struct slice){"", 1}));
    for (line = errors.p; (rest = strchr(line, '\n')) != NULL; line = rest + 1) {
        assert_memory_equal(line, file, n);
        assert_true(buf_put(said, (struct slice){line + n, (size_t)(rest + 1 - line) - n}));
    }
    assert_true(buf_put(said, (struct slice){"", 1}));
    buf_free(&errors);
    return c;
}

static struct config *load_good(const char *text)
{
    struct buf said = {0};
    struct config *c = load(text, &said);

    if (c == NULL || said.n != 1)
        fail_msg("not loaded without a word:\n%s", said.p);
    buf_free(&said);
    return c;
}

/* The whole of what is said, so that a second complaint about the same thing fails, too. */
static void expect(const char *text, const char *expected)
{
    struct buf said = {0};
    struct config *c = load(text, &said);

    if (strcmp(said.p, expected) != 0)
        fail_msg("of:\n%s\nexpected:\n%s\nsaid:\n%s", text, expected, said.p);
    assert_null(c);
    buf_free(&said);
}

static void expect_warning(const char *text, const char *expected)
{
    struct buf said = {0};
    struct config *c = load(text, &said);

    assert_string_equal(said.p, expected);
    assert_non_null(c);
    config_unref(c);
    buf_free(&said);
}

/* The good file with `more` behind it; expected begins in the line behind the good ones. */
static void expect_more(const char *more, const char *expected)
{
    char text[8192];

    snprintf(text, sizeof(text), "%s%s", good, more);
    expect(text, expected);
}

/* One option of an upstream beside its url, all in line 2. */
static void expect_upstream(const char *url, const char *options, const char *expected)
{
    char text[4096], line[512];

    snprintf(text, sizeof(text),
             "listen \"127.0.0.1:8080\" {}\nupstream \"u\" { url = \"%s\" %s }\n"
             "route \"/\" { upstream = \"u\" }\nlimit \"all\" { concurrency = 5 }\n",
             url, options);
    snprintf(line, sizeof(line), ":2: upstream \"u\": %s\n", expected);
    expect(text, line);
}

static void expect_redis(const char *url, const char *expected)
{
    char text[4096], line[512];

    snprintf(text, sizeof(text), "redis { url = \"%s\" }\n", url);
    snprintf(line, sizeof(line), ":5: redis: %s\n", expected);
    expect_more(text, line);
}

/* ---- what is read -------------------------------------------------------------------------------------- */

static void test_defaults(void **state)
{
    struct config *c = load_good(good);

    (void)state;
    assert_int_equal(c->n_listens, 1);
    assert_string_equal(c->listens[0].address.host, "127.0.0.1");
    assert_int_equal(c->listens[0].address.port, 8080);
    assert_int_equal(c->listens[0].half_close, CONFIG_HALF_ABORT);
    assert_false(c->has_admin);
    assert_true(c->workers >= 1);
    assert_int_equal(c->n_redis, 1);
    assert_string_equal(c->redis[0].name, "default");
    assert_int_equal(c->redis[0].kind, CONFIG_REDIS_EMBEDDED);
    assert_int_equal(c->redis[0].timeout_ms, 250);
    assert_int_equal(c->heartbeat_ms, 2000);
    assert_int_equal(c->ttl_ms, 6000);
    assert_int_equal(c->head_max_bytes, 65536);
    assert_int_equal(c->body_memory_bytes, 256 << 20);
    assert_int_equal(c->max_connections, 20000);
    assert_int_equal(c->upstreams[0].first_byte_timeout_ms, 600000);
    assert_int_equal(c->upstreams[0].pool_idle_max, 256);
    assert_true(c->upstreams[0].tls.verify);
    assert_int_equal(c->tenant.from, CONFIG_TENANT_NONE);
    assert_int_equal(c->limits[0].concurrency, 5);
    assert_false(c->any_limit_needs_model);
    assert_true(c->log.calls);
    config_unref(c);
}

static void test_everything(void **state)
{
    struct config *c = load_good(
        "workers = 3\n"
        "listen \"[0:0::1]:0\" { half_close = probe }\n"
        "listen \"*:8080\" {}\n"
        "admin \"localhost:9\" { token = t0k }\n"
        "client { head_max = 8k body_max = 1g model_header = X-Model }\n"
        "redis \"a\" { url = \"redis://me:p%40ss@[::1]:7000/3\" on_outage = allow }\n"
        "lease { heartbeat = 500ms ttl = 1m strict = yes reuse = 0s }\n"
        "upstream \"x\" { url = \"https://API.example:443/base/\"\n"
        "  header \"X-Key\" { value = 'k $1' } api = anthropic on_client_gone = drain }\n"
        "upstream \"y\" { url = \"http://[::1]:81\" pass_host = true }\n"
        "route \"/\" { upstream = x }\n"
        "route \"/v1/long\" { upstream = y }\n"
        "route \"/v1\" { upstream = x }\n"
        "tenant { from = \"header:X-Org\" log = hash map \"1\" { to = acme } }\n"
        "limit \"m\" { model = {\"a\", # comments stand anywhere\n"
        "  \"b*\"} tenant = acme upstream = {y} per = {model} concurrency = 0\n"
        "  redis = \"\" override \"b1\" { concurrency = 7 } shards = 1 wait = 0ms queue = 0 }\n"
        "limit \"n\" { concurrency = 1 per = {tenant, model} }\n"
        "log { format = logfmt level = error calls = no file = \"x.log\" }\n");

    (void)state;
    assert_int_equal(c->workers, 3);
    assert_string_equal(c->listens[0].address.host, "::1");
    assert_int_equal(c->listens[0].address.port, 0);
    assert_int_equal(c->listens[0].half_close, CONFIG_HALF_PROBE);
    assert_string_equal(c->listens[1].address.host, "");
    assert_string_equal(c->admin.host, "127.0.0.1");
    assert_string_equal(c->admin_token, "t0k");
    assert_string_equal(c->model_header, "x-model");
    assert_int_equal(c->head_max_bytes, 8192);
    assert_int_equal(c->body_max_bytes, 1 << 30);
    assert_string_equal(c->redis[0].user, "me");
    assert_string_equal(c->redis[0].password, "p@ss");
    assert_string_equal(c->redis[0].host, "::1");
    assert_int_equal(c->redis[0].port, 7000);
    assert_int_equal(c->redis[0].db, 3);
    assert_string_equal(c->redis[0].url, "redis://me:***@[::1]:7000/3");
    assert_int_equal(c->redis[0].on_outage, CONFIG_OUTAGE_ALLOW);
    assert_int_equal(c->ttl_ms, 60000);
    assert_true(c->strict);
    assert_true(c->upstreams[0].use_tls);
    assert_string_equal(c->upstreams[0].host, "api.example");
    assert_string_equal(c->upstreams[0].authority, "api.example");
    assert_string_equal(c->upstreams[0].path_prefix, "/base");
    assert_string_equal(c->upstreams[0].headers[0].name, "X-Key");
    assert_string_equal(c->upstreams[0].headers[0].value, "k $1");
    assert_int_equal(c->upstreams[0].api, CONFIG_API_ANTHROPIC);
    assert_string_equal(c->upstreams[1].authority, "[::1]:81");
    assert_int_equal(c->upstreams[1].index, 1);
    assert_string_equal(c->routes[0].prefix, "/v1/long");
    assert_string_equal(c->routes[1].prefix, "/v1");
    assert_string_equal(c->routes[2].prefix, "/");
    assert_ptr_equal(c->routes[0].upstream, &c->upstreams[1]);
    assert_string_equal(c->tenant.header, "x-org");
    assert_int_equal(c->tenant.log, CONFIG_TENANT_LOG_HASH);
    assert_string_equal(c->tenant.map[0].to, "acme");
    assert_int_equal(c->limits[0].n_models, 2);
    assert_string_equal(c->limits[0].models[1], "b*");
    assert_int_equal(c->limits[0].concurrency, 0);
    assert_string_equal(c->limits[0].overrides[0].value, "b1");
    assert_int_equal(c->limits[0].overrides[0].concurrency, 7);
    assert_true(c->limits[1].per_tenant && c->limits[1].per_model);
    assert_true(c->any_limit_needs_model);
    assert_false(c->log.calls);
    assert_string_equal(c->log.file, "x.log");
    config_unref(c);
}

static void test_environment(void **state)
{
    static const char text[] = "listen \"${LG_TEST_LISTEN:-127.0.0.1:1}\" {}\n"
                               "upstream \"u\" { url = \"${LG_TEST_URL:-https://[::1]:9/x}\" }\n"
                               "route \"/\" { upstream = u }\nlimit \"l\" { concurrency = ${LG_TEST_N:-3} }\n"
                               "redis { url = \"${LG_TEST_REDIS:-embedded}\" }\n";
    struct config *c = load_good(text);

    (void)state;
    assert_string_equal(c->upstreams[0].url, "https://[::1]:9/x");
    assert_int_equal(c->limits[0].concurrency, 3);
    assert_int_equal(c->redis[0].kind, CONFIG_REDIS_EMBEDDED);
    config_unref(c);
    setenv("LG_TEST_URL", "http://a.b:81", 1);
    setenv("LG_TEST_N", "44", 1);
    setenv("LG_TEST_REDIS", "redis://r", 1);
    c = load_good(text);
    assert_string_equal(c->upstreams[0].url, "http://a.b:81");
    assert_int_equal(c->limits[0].concurrency, 44);
    assert_string_equal(c->redis[0].host, "r");
    config_unref(c);
    unsetenv("LG_TEST_URL");
    unsetenv("LG_TEST_N");
    unsetenv("LG_TEST_REDIS");
}

/* A default stands for a variable that is not set; one that is set and empty is empty. */
static void test_environment_missing(void **state)
{
    (void)state;
    expect_more(
        "admin \"127.0.0.1:1\" { token = \"${LG_TEST_NOT_SET}\" }\n",
        ":5: the environment has no LG_TEST_NOT_SET; set it, or write ${LG_TEST_NOT_SET:-} where it may be "
        "empty\n");
    setenv("LG_TEST_EMPTY", "", 1);
    expect_upstream("${LG_TEST_EMPTY:-http://a}", "", "`url`: write http://HOST[:PORT][/PATH] or https://…");
    unsetenv("LG_TEST_EMPTY");
}

/* ---- what is refused ----------------------------------------------------------------------------------- */

static void test_all_in_one_run(void **state)
{
    (void)state;
    expect("# a comment\n"
           "/* one over\n"
           "   two lines */ wrokers = 4\n"
           "listen \"127.0.0.1:99999\" {}\n"
           "lease { heartbeat = 4s ttl = 6s }\n"
           "upstream \"llm\" { url = \"http://x\"\n"
           "  conect_timeout = 5s\n"
           "  pool { size = {1, \"}\"} }\n"
           "  idle_timeout = 5x\n"
           "}\n"
           "frobnicate \"me\" { a = b }\n"
           "route \"/\" { upstream = \"lml\" }\n"
           "limit \"l\" { concurrency = -1 }\n"
           "limit \"l\" { concurrency = NaN }\n",
           ":3: unknown option `wrokers` at top level\n"
           ":4: listen \"127.0.0.1:99999\": write \"ADDRESS:PORT\": an IPv4, [IPv6] address or * and a port "
           "up to 65535\n"
           ":5: lease: `ttl` (6s) must be at least two heartbeats (4s), better three\n"
           ":7: unknown option `conect_timeout` in upstream\n"
           ":8: unknown option `pool` in upstream\n"
           ":9: upstream \"llm\": `idle_timeout` = 5x is no duration: write 250ms, 2s, 5m or 1h\n"
           ":11: unknown option `frobnicate` at top level\n"
           ":12: route \"/\": there is no upstream \"lml\"\n"
           ":13: limit \"l\": `concurrency` = -1 is no whole number from 0 to 1000000\n"
           ":14: limit \"l\": `concurrency` = NaN is no whole number from 0 to 1000000\n"
           ":14: limit \"l\": is there twice; first in line 13\n");
}

static void test_missing(void **state)
{
    (void)state;
    expect("", ": there is no `listen \"ADDRESS:PORT\" {}`: nobody could connect\n"
               ": there is no `upstream \"NAME\" { url = … }`: nothing could be forwarded\n"
               ": there is no `route \"/\" { upstream = … }`: nothing is forwarded\n"
               ": warning: there is no limit: calls are forwarded uncounted\n");
    expect_more(
        "upstream \"u\" {\n}\nroute \"/u\" {\n}\nlimit \"x\" {\n override \"a\" {} }\n",
        ":5: upstream \"u\": `url` is missing: http:// or https://, host, port, path that is put before the "
        "client's\n"
        ":7: route \"/u\": `upstream` is missing: where calls whose path begins so go; the longest prefix "
        "wins\n"
        ":9: limit \"x\": `concurrency` is missing: calls in flight at once; 0: nothing enters, running "
        "calls "
        "go on\n"
        ":10: limit \"x\": override \"a\": `concurrency` is missing: instead of the limit's own, for this "
        "value "
        "of its `per` word\n"
        ":10: limit \"x\": override \"a\": an override needs a limit that is `per` one word: tenant or "
        "model\n");
}

static void test_not_in_this_version(void **state)
{
    (void)state;
    expect_more(
        "limit \"x\" { concurrency = 1\n wait = 2s\n queue = 1000\n shards = 4 redis = b\n}\nlease { reuse = "
        "20ms }\n"
        "redis { on_outage = local }\n",
        ":6: limit \"x\": `wait` is not available in this version; remove it or set it to 0s\n"
        ":7: limit \"x\": `queue` is not available in this version; remove it or set it to 0\n"
        ":8: limit \"x\": `redis` is not available in this version; remove it\n"
        ":8: limit \"x\": `shards` is not available in this version; remove it or set it to 1\n"
        ":10: lease: `reuse` is not available in this version; remove it or set it to 0ms\n"
        ":11: redis: `on_outage` = local is not available in this version; write one of deny|allow\n");
    expect_redis("redis+sentinel://a,b/m",
                 "`url`: redis+sentinel is not available in this version; write redis://, "
                 "rediss://, unix:// or embedded");
    expect_redis("redis+cluster://a,b",
                 "`url`: redis+cluster is not available in this version; write redis://, "
                 "rediss://, unix:// or embedded");
}

static void test_values(void **state)
{
    (void)state;
    expect_more("workers = 300\n", ":5: `workers` = 300 is out of range: 0 to 256\n");
    expect_more("workers = {1, 2}\n", ":5: `workers` takes one value, not a list\n");
    expect_more("workers = 1\nworkers = 1\n", ":6: `workers` is given twice; first in line 5\n");
    expect_more("drain_timeout = 5\n", ":5: `drain_timeout` = 5 is no duration: write 250ms, 2s, 5m or 1h\n");
    expect_more("drain_timeout = 25h\n", ":5: `drain_timeout` = 25h is out of range: 0s to 24h\n");
    expect_more("client { head_max = 2m }\n", ":5: client: `head_max` = 2m is out of range: 1k to 1m\n");
    expect_more("client { head_max = big }\n",
                ":5: client: `head_max` = big is no size: write 64k, 8m, 1g or a number of bytes\n");
    expect_more("head_max = 8k\n", ":5: unknown option `head_max` at top level; it belongs into client\n");
    expect_more("client { listen = 8k }\n",
                ":5: unknown option `listen` in client; it belongs to the top level\n");
    expect_more("lease { strict = perhaps }\n", ":5: lease: `strict` = perhaps: write true or false\n");
    expect_more("lease {}\nlease {}\n", ":6: `lease` may stand there once; first in line 5\n");
    expect_more("log { level = loud }\n", ":5: log: `level` = loud: write one of error|warn|info|debug\n");
    expect_more("redis { timeout = 6s }\n",
                ":5: redis: `timeout` (6s) must be less than the lease's `ttl` (6s), or "
                "leases die while Redis is slow\n");
    expect_more("redis { prefix = \"a{b}\" }\n",
                ":5: redis: `prefix` must be 1 to 64 of A-Z a-z 0-9 . _ -\n");
    expect_more("tenant { from = cookie }\n",
                ":5: tenant: `from` = cookie: write none, key or header:NAME\n");
    expect_more("tenant { from = \"header:a b\" }\n", ":5: tenant: `from`: `a b` is no name of a header\n");
    expect_more("tenant { map \"a\" { to = b } }\n",
                ":5: tenant: map: maps tenants, but the tenant comes `from` nowhere\n");
    expect_warning(
        "listen \":1\" {} upstream \"u\" { url = \"http://x\" } route \"/\" { upstream = u }\n"
        "limit \"l\" { concurrency = 1 }\nlease { ttl = 5s }\n",
        ":3: warning: lease: `ttl` (5s) is less than three heartbeats (2s): one late renewal may lose a "
        "slot\n");
}

static void test_limits(void **state)
{
    (void)state;
    expect_more("limit \"a b\" { concurrency = 1 }\n",
                ":5: limit \"a b\": a name is 1 to 64 of A-Z a-z 0-9 . _ -\n");
    expect_more("limit \"a\" { concurrency = 1 upstream = {llm, other} }\n",
                ":5: limit \"a\": there is no upstream \"other\"\n");
    expect_more("limit \"a\" { concurrency = 1 per = {user} }\n",
                ":5: limit \"a\": `per` = user: write tenant, model, or both\n");
    expect_more("limit \"a\" { concurrency = 1 per = {model, model} }\n",
                ":5: limit \"a\": `per` names model twice\n");
    expect_more("limit \"a\" { concurrency = 1\n per = tenant }\n",
                ":6: limit \"a\": asks for a tenant, but there is no `tenant { from = … }`\n");
    expect_more("limit \"a\" { concurrency = 1 override \"x\" { concurrency = 2 } }\n",
                ":5: limit \"a\": override \"x\": an override needs a limit that is `per` one word: tenant "
                "or model\n");
    expect_more("limit \"a\" { concurrency = 1 per = model override \"x\" { concurrency = 2 }\n"
                " override \"x\" { concurrency = 2 } }\n",
                ":6: limit \"a\": override \"x\": is there twice; first in line 5\n");
    expect_more("limit \"a\" { concurrency = 1 per = model override \"X\" { concurrency = 2 }\n"
                " override \"x\" { concurrency = 2 } }\n", /* models heed no case */
                ":6: limit \"a\": override \"x\": is there twice; first in line 5\n");
    expect_more("limit \"a\" { concurrency = 1 model = {} }\n",
                ":5: limit \"a\": `model` is an empty list; leave it out\n");
    expect_more("limit \"a\" { concurrency = 1 model = {\"\"} }\n",
                ":5: limit \"a\": `model`: a pattern has 1 to 256 bytes\n");
    expect_more("limit \"a\" { concurrency = 1 model = {\"gpt-?\"} }\n",
                ":5: limit \"a\": `model` = gpt-?: only * is special in a pattern, ? is not\n");
    expect_more("limit \"a\" { concurrency = 1 model = {\"gpt 4\"} }\n",
                ":5: limit \"a\": `model`: a pattern has a space or control character in it\n");
    expect_more("limit \"a\" { concurrency = 1 model = {\"x\", \"x\"} }\n",
                ":5: limit \"a\": `model` names x twice\n");
    expect_more("limit \"a\" { concurrency = 1 model = {gpt-4o-*} }\n",
                ":5: a value with `*` needs quotes\n");
}

static void test_titles_and_texts(void **state)
{
    (void)state;
    expect_more(
        "limit \"a\" { concurrency = 1 per = model override \"\" { concurrency = 2 }\n"
        " override \"\\x1b[2J\" { concurrency = 2 } }\n",
        ":5: limit \"a\": override: its title must have 1 to 256 bytes and no control character\n"
        ":6: limit \"a\": override \"?[2J\": its title must have 1 to 256 bytes and no control character\n");
    expect_more("tenant { from = key map \"a\" { to = \"\" } }\n",
                ":5: tenant: map: `to`: a tenant's name has 1 to 256 bytes\n");
    expect_more("log { file = \"a\\nb\" }\n", ":5: log: `file` has a control character in it\n");
    expect_warning("listen \":1\" {} upstream \"u\" { url = \"https://x\"\n tls_verify = false }\n"
                   "route \"/\" { upstream = u } limit \"l\" { concurrency = 1 }\n",
                   ":2: warning: upstream \"u\": anybody between here and x can read and change its calls\n");
}

/* `+=` adds to a list, also when other options stand between. */
static void test_append(void **state)
{
    struct config *c = load_good(
        "listen \":1\" {} upstream \"u\" { url = \"http://x\" } route \"/\" { upstream = u }\n"
        "limit \"l\" { model = {a} concurrency = 1 model += {b, c} }\n");

    (void)state;
    assert_int_equal(c->limits[0].n_models, 3);
    assert_string_equal(c->limits[0].models[2], "c");
    config_unref(c);
}

static void test_headers(void **state)
{
    char many[1024];
    size_t n = 0;

    (void)state;
    expect_upstream("http://x", "header \"a\" { value = \"k\\r\\nx: y\" }",
                    "header \"a\": `value` has a line end in it (a key read from a file?)");
    setenv("LG_TEST_KEY", "sk-1\n", 1);
    expect_upstream("http://x", "header \"a\" { value = \"${LG_TEST_KEY}\" }",
                    "header \"a\": `value` has a line end in it (a key read from a file?)");
    unsetenv("LG_TEST_KEY");
    expect_more("upstream \"v\" { url = \"http://x\" header \"a\" { value = \"k\n\n\" }\n api = x }\n",
                ":7: upstream \"v\": header \"a\": `value` has a line end in it (a key read from a file?)\n"
                ":8: upstream \"v\": `api` = x: write one of openai|anthropic|gemini\n");
    expect_upstream("http://x", "header \"a\" { value = \"k\\x07\" }",
                    "header \"a\": `value` has a control character in it");
    expect_upstream("http://x", "header \"a\" { value = \"Bearer ${LG_TEST_NOT_SET:-}\" }",
                    "header \"a\": `value` begins or ends with a space (an empty variable?)");
    expect_upstream("http://x", "header \"a b\" {}", "header \"a b\": is no name of a header");
    expect_upstream("http://x", "header \"Content-Length\" {}",
                    "header \"Content-Length\": is written by the gateway itself and cannot be set");
    expect_upstream("http://x", "header \"transfer-encoding\" {}",
                    "header \"transfer-encoding\": is written by the gateway itself and cannot be set");
    expect_upstream("http://x", "header \"HOST\" {}",
                    "header \"HOST\": is written by the gateway itself and cannot be set");
    expect_upstream("http://x", "header \"X-Leasegate-Task\" {}",
                    "header \"X-Leasegate-Task\": is written by the gateway itself and cannot be set");
    for (unsigned i = 0; i < 34; i++) /* one complaint for all that are too many */
        n += (size_t)snprintf(many + n, sizeof(many) - n, "header \"h%u\" {} ", i);
    expect_upstream("http://x", many, "header \"h32\": is one too many: an upstream sets at most 32 headers");
    expect_upstream("http://x", "header \"a\" {} header \"A\" {}",
                    "header \"A\": is there twice; first in line 2");
    expect_more(
        "admin \"127.0.0.1:1\" {\n token = \"a b\" }\n",
        ":6: admin \"127.0.0.1:1\": `token` must be at most 1024 visible ASCII characters without spaces\n");
}

static void test_nul(void **state)
{
    static const char bytes[] = "workers = 1\nworkers = \0 2\n";
    struct buf errors = {0};
    struct config *c;

    (void)state;
    expect_more("admin \"127.0.0.1:1\" { token = \"a\\0b\" }\n", ":5: a string cannot hold a NUL\n");
    expect_more("admin \"127.0.0.1:1\" { token = \"a\\x00b\" }\n", ":5: a string cannot hold a NUL\n");
    write_file(bytes, sizeof(bytes) - 1);
    assert_false(config_load(file, &c, &errors));
    assert_true(buf_put(&errors, (struct slice){"", 1}));
    assert_string_equal(errors.p + strlen(file), ":2: there is a NUL byte in this line: not a text file\n");
    buf_free(&errors);
}

static void test_addresses(void **state)
{
    static const char *const bad[] = {"127.0.0.1", "127.0.0.1:", "1.2.3:80", "[::1:80",       "::1:80",
                                      "name:80",   "",           ":65536",   "127.0.0.1:0x50"};
    char text[128], expected[256];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char title[64] = "";

        if (bad[i][0] != '\0')
            snprintf(title, sizeof(title), " \"%s\"", bad[i]);
        snprintf(text, sizeof(text), "listen \"%s\" {}\n", bad[i]);
        snprintf(
            expected, sizeof(expected),
            ":5: listen%s: write \"ADDRESS:PORT\": an IPv4, [IPv6] address or * and a port up to 65535\n",
            title);
        expect_more(text, expected);
    }
    expect_more("listen \"127.0.0.1:8080\" {}\n",
                ":5: listen \"127.0.0.1:8080\": is the same address as in line 1\n");
    expect_more("admin \"localhost:8080\" {}\n",
                ":5: admin \"localhost:8080\": is the same address as the listener in line 1\n");
    expect_more("admin \"0.0.0.0:8081\" {}\n",
                ":5: admin \"0.0.0.0:8081\": is not on loopback, so it needs a `token`\n");
    config_unref(load_good("listen \"[::1]:0\" {} listen \"[::1]:0\" {} admin \"0.0.0.0:1\" { token = x }\n"
                           "upstream \"u\" { url = \"http://x\" } route \"/\" { upstream = u }\n"
                           "limit \"l\" { concurrency = 1 }\n"));
}

static void test_upstream_urls(void **state)
{
    static const char how[] = "`url`: write http://HOST[:PORT][/PATH] or https://…";
    static const char path[] = "`url` must end with its path: no ? and no #";

    (void)state;
    expect_upstream("ftp://x", "", how);
    expect_upstream("x:80", "", how);
    expect_upstream("http://a b", "", how);
    expect_upstream("http://[::1", "", how);
    expect_upstream("http://x:", "", how);
    expect_upstream("http://k:v@x", "",
                    "`url` must not hold a user or password; use header \"authorization\" { value = … }");
    expect_upstream("http://x/a?b", "", path);
    expect_upstream("http://x#", "", path);
    expect_upstream("http://x:0", "", "`url`: the port is a number from 1 to 65535");
    expect_upstream("http://x:99999", "", "`url`: the port is a number from 1 to 65535");
    expect_upstream("http://", "", "`url`: `` is no host name, IPv4 or [IPv6] address");
    expect_upstream("http://1.2.3.400", "", "`url`: `1.2.3.400` is no host name, IPv4 or [IPv6] address");
    expect_upstream("http://[::g]", "", "`url`: `::g` is no host name, IPv4 or [IPv6] address");
    expect_upstream("http://a..b", "", "`url`: `a..b` is no host name, IPv4 or [IPv6] address");
}

static void test_redis_urls(void **state)
{
    static const char how[] = "`url`: write redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss://…, "
                              "unix:///PATH[?db=N] or embedded";
    static const char login[] = "`url`: before the @ write USER:PASSWORD or :PASSWORD";
    static const char db[] = "`url`: the database is a number, as in redis://HOST/0 or unix:///PATH?db=0";
    static const char unix_path[] =
        "`url`: write unix:///PATH[?db=N], the path absolute and at most 107 bytes";
    static const char percent[] =
        "`url`: a % in user or password is followed by two hexadecimal digits, not 00";

    (void)state;
    expect_redis("", how);
    expect_redis("localhost:6379", how);
    expect_redis("http://x", "`url`: the scheme is redis, rediss or unix");
    expect_redis("redis://", "`url`: a host name, IPv4 or [IPv6] address must follow");
    expect_redis("redis://secret@h", login);
    expect_redis("redis://me:@h", login);
    expect_redis("redis://:a%4@h", percent);
    expect_redis("redis://:a%00@h", percent);
    expect_redis("redis://h/x", db);
    expect_redis("redis://h/0?x=1", "`url`: nothing may follow the database");
    expect_redis("redis://h:0", "`url`: the port is a number from 1 to 65535");
    expect_redis("unix://host/path", unix_path);
    expect_redis("unix:///", unix_path);
    expect_redis("unix:///run/r?db=", db);
    expect_redis("unix:///run/r?x=1", db);
    expect_more("redis { url = \"redis://h\" }\nredis { url = \"redis://i\" }\n",
                ":6: redis: several redis sections are not available in this version; first in line 5\n");
    expect_more(
        "redis \"a\" {}\nredis \"b\" {\n prefix = \"\" }\nredis \"c\" {}\n",
        ":6: redis \"b\": several redis sections are not available in this version; first in line 5\n"
        ":7: redis \"b\": `prefix` must be 1 to 64 of A-Z a-z 0-9 . _ -\n"
        ":8: redis \"c\": several redis sections are not available in this version; first in line 5\n");
    expect_more("redis \"a\" {}\nredis {}\n", ":6: missing title for section 'redis'; reading stopped here "
                                              "(either one redis section without a name, "
                                              "or all of them with one)\n");
}

static struct config *load_redis(const char *url)
{
    char text[1024];

    snprintf(text, sizeof(text), "%sredis { url = \"%s\" tls_verify = off }\n", good, url);
    return load_good(text);
}

static void test_good_redis_urls(void **state)
{
    struct config *c = load_redis("unix:///run/redis.sock?db=2");

    (void)state;
    assert_int_equal(c->redis[0].kind, CONFIG_REDIS_UNIX);
    assert_string_equal(c->redis[0].path, "/run/redis.sock");
    assert_int_equal(c->redis[0].db, 2);
    config_unref(c);
    c = load_redis("rediss://:pw@Redis.Example");
    assert_int_equal(c->redis[0].kind, CONFIG_REDIS_TCP);
    assert_true(c->redis[0].use_tls);
    assert_string_equal(c->redis[0].user, "");
    assert_string_equal(c->redis[0].password, "pw");
    assert_string_equal(c->redis[0].host, "redis.example");
    assert_int_equal(c->redis[0].port, 6379);
    assert_false(c->redis[0].tls.verify);
    config_unref(c);
}

static void test_routes(void **state)
{
    (void)state;
    expect_more(
        "route \"v1\" { upstream = llm }\n",
        ":5: route \"v1\": a route is the beginning of a path: it starts with / and has no ? # or space\n");
    expect_more(
        "route \"/a?b\" { upstream = llm }\n",
        ":5: route \"/a?b\": a route is the beginning of a path: it starts with / and has no ? # or space\n");
    expect_more("route \"/\" { upstream = llm }\n", ":5: route \"/\": is there twice; first in line 3\n");
    expect_more("upstream \"llm\" { url = \"http://x\" }\n",
                ":5: upstream \"llm\": is there twice; first in line 2\n");
}

static void test_tls(void **state)
{
    char text[512];
    struct config *c;

    (void)state;
    expect_more(
        "listen \"127.0.0.1:1\" {\n tls_cert = \"/nonexistent/c.pem\"\n tls_key = \"/nonexistent/k.pem\" }\n",
        ":6: listen \"127.0.0.1:1\": `tls_cert`: /nonexistent/c.pem cannot be read: No such file or "
        "directory\n"
        ":7: listen \"127.0.0.1:1\": `tls_key`: /nonexistent/k.pem cannot be read: No such file or "
        "directory\n");
    expect_more("listen \"127.0.0.1:1\" { tls_cert = \"/\" }\n",
                ":5: listen \"127.0.0.1:1\": `tls_cert`: / is not a regular file\n");
    snprintf(text, sizeof(text), "listen \"127.0.0.1:1\" {\n tls_key = \"%s\" }\n", file);
    expect_more(text, ":6: listen \"127.0.0.1:1\": `tls_key` without `tls_cert`\n");
    snprintf(text, sizeof(text), "listen \"127.0.0.1:1\" {\n tls_cert = \"%s\" }\n", file);
    expect_more(text, ":6: listen \"127.0.0.1:1\": `tls_cert` without `tls_key`\n");
    snprintf(text, sizeof(text), "listen \"127.0.0.1:1\" {\n client_ca = \"%s\" }\n", file);
    expect_more(text, ":6: listen \"127.0.0.1:1\": `client_ca` without `tls_cert`\n");
    snprintf(text, sizeof(text), "redis { tls_ca = \"%s\" }\n", file);
    expect_more(text, ":5: redis: has tls_ options, but its `url` is not rediss://\n");
    snprintf(text, sizeof(text), "tls_ca = \"%s\"", file);
    expect_upstream("http://x", text, "has tls_ options, but its `url` is not https://");
    snprintf(text, sizeof(text),
             "%slisten \"127.0.0.1:1\" { tls_cert = \"%s\" tls_key = \"%s\" client_ca = \"%s\" }\n", good,
             file, file, file);
    c = load_good(text);
    assert_string_equal(c->listens[1].tls.cert, file);
    assert_int_equal(c->listens[1].tls.line, GOOD_LINES + 1);
    config_unref(c);
}

static void test_syntax(void **state)
{
    (void)state;
    expect_more("upstream \"u\" {\n", ":5: this `{` is not closed with `}`\n");
    expect_more("limit \"l\" { concurrency = 1\n model = { a\n", ":6: this `{` is not closed with `}`\n");
    expect_more("workers =\n", ":6: premature end of file; reading stopped here\n");
    expect_more("upstream \"u\" { url = \"http:\n", ":5: this string is not closed with \"\n");
    expect_more("/* never\nclosed\n", ":5: this comment is not closed with */\n");
    expect_more("}\n", ":5: unexpected closing brace; reading stopped here\n");
    expect_more("workers 4\n", ":5: missing equal sign after option 'workers'; reading stopped here\n");
    expect_more("workers = 4;\n", ":5: no `;` is needed: options end by themselves\n");
    expect_more("workers = ${LG_TEST_N:-4\n", ":5: `${` without `}` in the same line\n");
    expect_more("a_name_that_is_much_longer_than_any_option_of_this_program_could_ever_be = 1\nworkers = x\n",
                ":5: no such option "
                "'a_name_that_is_much_longer_than_any_option_of_this_program_could_ever_be'; reading "
                "stopped here\n");
    expect_more("\"workers\" = 4\n", ":5: names of options are not quoted\n");
    expect_more("redis|url = x\n", ":5: a value with `|` needs quotes\n");
    expect_more("limit { concurrency = 1 }\n",
                ":5: missing title for section 'limit'; reading stopped here\n");
    expect_more("\"upstream=llm|header\" \"x\" {}\n",
                ":5: a name with `|` is no option; options stand in their section\n");
}

static void test_unreadable(void **state)
{
    struct buf errors = {0};
    struct config *c;

    (void)state;
    assert_false(config_load("/nonexistent/proxy.conf", &c, &errors));
    assert_true(buf_put(&errors, (struct slice){"", 1}));
    assert_string_equal(errors.p, "/nonexistent/proxy.conf: cannot be read: No such file or directory\n");
    buf_free(&errors);
}

static void test_too_large(void **state)
{
    char *text = mem_must_zalloc((1 << 20) + 16);
    struct buf said = {0};

    (void)state;
    memset(text, '#', (1 << 20) + 15);
    assert_null(load(text, &said));
    assert_string_equal(said.p, ": is larger than 1048576 bytes\n");
    buf_free(&said);
    mem_free(text);
}

static void test_no_more_than_a_hundred(void **state)
{
    struct buf text = {0}, said = {0};
    size_t lines = 0;

    (void)state;
    for (unsigned i = 0; i < 300; i++)
        assert_true(buf_put(&text, SLICE("limit \"x y\" { concurrency = no }\n")));
    assert_true(buf_put(&text, (struct slice){"", 1}));
    assert_null(load(text.p, &said));
    for (const char *p = said.p; *p != '\0'; p++)
        lines += *p == '\n';
    assert_int_equal(lines, 101);
    assert_non_null(strstr(said.p, "more problems\n"));
    buf_free(&text);
    buf_free(&said);
}

/* ---- shipped files, dump, table ------------------------------------------------------------------------ */

/* Tests run from the root of the tree; the shipped files are part of what is tested. */
static void load_shipped(const char *path)
{
    struct buf errors = {0}, first = {0}, second = {0};
    struct config *c;

    if (!config_load(path, &c, &errors))
        fail_msg("%.*s", (int)errors.n, errors.p);
    assert_int_equal(errors.n, 0);
    assert_true(config_dump(c, &first));
    config_unref(c);
    write_file(first.p, first.n);
    if (!config_load(file, &c, &errors))
        fail_msg("the dump of %s: %.*s", path, (int)errors.n, errors.p);
    assert_true(config_dump(c, &second));
    assert_int_equal(first.n, second.n);
    assert_memory_equal(first.p, second.p, first.n);
    config_unref(c);
    buf_free(&errors);
    buf_free(&first);
    buf_free(&second);
}

/* The examples name keys by the environment and TLS files by a folder of their own. */
static void test_shipped(void **state)
{
    static const char *const keys[] = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY",
                                       "AZURE_API_KEY"};
    static const char *const pem[] = {"server.pem", "server.key", "clients-ca.pem", "redis-ca.pem",
                                      "upstream-ca.pem"};
    glob_t found;

    (void)state;
    load_shipped("proxy.conf.example");
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        setenv(keys[i], "sk-test", 1);
    setenv("LEASEGATE_ADMIN_TOKEN", "token", 1);
    setenv("LEASEGATE_TLS", directory, 1);
    for (size_t i = 0; i < ARRAY_LEN(pem); i++) {
        char path[128];
        int fd;

        snprintf(path, sizeof(path), "%s/%s", directory, pem[i]);
        fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        close(fd);
    }
    assert_int_equal(glob("config/examples/*.conf", 0, NULL, &found), 0);
    assert_true(found.gl_pathc >= 8);
    for (size_t i = 0; i < found.gl_pathc; i++)
        load_shipped(found.gl_pathv[i]);
    globfree(&found);
    for (size_t i = 0; i < ARRAY_LEN(pem); i++) {
        char path[128];

        snprintf(path, sizeof(path), "%s/%s", directory, pem[i]);
        unlink(path);
    }
}

static void test_dump_hides_secrets(void **state)
{
    struct buf out = {0};
    struct config *c = load_good(
        "listen \":1\" {} admin \":2\" { token = s3cret1 }\n"
        "redis { url = \"redis://me:s3cret2@h\" }\n"
        "upstream \"u\" { url = \"http://x\" header \"a\" { value = \"s3cret3\" } }\n"
        "route \"/\" { upstream = u } limit \"l\" { concurrency = 1 }\n"
        "tenant { from = key map \"s3cret4\" { to = a } }\n");

    (void)state;
    assert_true(config_dump(c, &out));
    assert_true(buf_put(&out, (struct slice){"", 1}));
    assert_null(strstr(out.p, "s3cret"));
    assert_non_null(strstr(out.p, "map \"***1\" {"));
    assert_non_null(strstr(out.p, "token = \"***\""));
    assert_non_null(strstr(out.p, "url = \"redis://me:***@h:6379/0\""));
    assert_non_null(strstr(out.p, "value = \"***\""));
    config_unref(c);
    buf_free(&out);
}

static char *slurp(const char *path)
{
    FILE *f = fopen(path, "r");
    char *text = mem_must_zalloc(1 << 17);

    assert_non_null(f);
    assert_true(fread(text, 1, (1 << 17) - 1, f) > 0);
    fclose(f);
    return text;
}

/* Each row of the table stands in the reference with type and default, and by name in proxy.conf.example. */
static void test_table_is_documented(void **state)
{
    char *readme = slurp("config/README.md"), *example = slurp("proxy.conf.example");
    size_t n;
    const struct config_option_row *rows = config_options(&n);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        const struct config_option_row *o = &rows[i];
        char row[256], type[64], name[64], fallback[32];
        size_t k = 0;

        for (const char *p = o->type; *p != '\0' && k < sizeof(type) - 3; p++) {
            if (*p == '|')
                type[k++] = '\\';
            type[k++] = *p;
        }
        type[k] = '\0';
        snprintf(fallback, sizeof(fallback), strcmp(o->default_text, "required") == 0 ? "%s" : "`%s`",
                 *o->default_text == '\0' ? "\"\"" : o->default_text);
        snprintf(row, sizeof(row), "| %s | `%s` | %s | %s | %s |",
                 *o->section == '\0' ? "top level" : o->section, o->name, type, fallback,
                 o->reloadable ? "yes" : "no");
        if (strstr(readme, row) == NULL)
            fail_msg("config/README.md lacks: %s", row);
        snprintf(name, sizeof(name), "%s = ", o->name);
        if (strstr(example, name) == NULL)
            fail_msg("proxy.conf.example lacks %s of %s", o->name, o->section);
    }
    mem_free(readme);
    mem_free(example);
}

/* ---- lifetime and memory ------------------------------------------------------------------------------- */

static void test_references(void **state)
{
    size_t before = mem_live_blocks();
    struct config *c = load_good(good);

    (void)state;
    config_set_embedded_path(c, "/tmp/r.sock");
    assert_string_equal(c->redis[0].path, "/tmp/r.sock");
    assert_ptr_equal(config_ref(c), c);
    config_unref(c);
    assert_string_equal(c->upstreams[0].name, "llm");
    config_unref(c);
    config_unref(NULL);
    assert_int_equal(mem_live_blocks(), before);
}

/* Fails each allocation in turn, once and for good: an error or the same snapshot, never a leak. */
static void test_out_of_memory(void **state)
{
    size_t before = mem_live_blocks();
    char *example = slurp("proxy.conf.example");

    (void)state;
    write_file(example, strlen(example));
    mem_free(example);
    for (unsigned mode = 0; mode < 2; mode++) {
        unsigned failures = 0;
        bool ok = false;

        for (unsigned i = 1; !ok; i++) {
            struct buf errors = {0};
            struct config *c;

            mem_fail_at(i, mode == 1);
            ok = config_load(file, &c, &errors);
            mem_fail_at(0, false);
            if (ok)
                assert_int_equal(c->n_limits, 3);
            else
                assert_null(c);
            if (!ok && mode == 0)
                assert_non_null(memmem(errors.p, errors.n, "out of memory", 13));
            failures += !ok;
            config_unref(c);
            buf_free(&errors);
            assert_int_equal(mem_live_blocks(), before);
        }
        assert_true(failures > 100);
    }
}

static void test_dump_out_of_memory(void **state)
{
    struct config *c = load_good(good);
    unsigned failures = 0;
    bool ok = false;

    (void)state;
    for (unsigned i = 1; !ok; i++) {
        struct buf out = {0};

        mem_fail_at(i, false);
        ok = config_dump(c, &out);
        mem_fail_at(0, false);
        failures += !ok;
        buf_free(&out);
    }
    assert_true(failures > 0);
    config_unref(c);
}

static int setup(void **state)
{
    (void)state;
    if (mkdtemp(directory) == NULL)
        return -1;
    snprintf(file, sizeof(file), "%s/f.conf", directory);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(file);
    if (rmdir(directory) != 0)
        return -1;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_everything),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_environment_missing),
        cmocka_unit_test(test_all_in_one_run),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_not_in_this_version),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_titles_and_texts),
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_nul),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_upstream_urls),
        cmocka_unit_test(test_redis_urls),
        cmocka_unit_test(test_good_redis_urls),
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_tls),
        cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_unreadable),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_no_more_than_a_hundred),
        cmocka_unit_test(test_shipped),
        cmocka_unit_test(test_dump_hides_secrets),
        cmocka_unit_test(test_table_is_documented),
        cmocka_unit_test(test_references),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_dump_out_of_memory),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
