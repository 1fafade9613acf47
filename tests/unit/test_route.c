/*
 * test_route.c - from a request head and a configuration file to upstream, tenant, model and scopes. Both go through
 * the parsers that the program uses.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "hash.h"
#include "mem.h"
#include "parse.h"
#include "route.h"

#include <unistd.h>

static struct config *load(const char *text)
{
    char path[] = "/tmp/lg-route-XXXXXX";
    int fd = mkstemp(path);
    struct config *c = NULL;
    struct buf errors = {0};

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    if (!config_load(path, &c, &errors))
        fail_msg("%.*s", (int)errors.n, errors.p);
    unlink(path);
    buf_free(&errors);
    return c;
}

static struct http_field fields[HTTP_FIELDS_MAX];

/* The head borrows text. */
static struct http_head parse(const char *text)
{
    struct http_head h = {.fields = fields};
    enum parse_error e = parse_request(text, strlen(text), &h);

    if (e != PARSE_OK)
        fail_msg("<%s>: %s", text, parse_error_text(e));
    return h;
}

#define BASE                                                                                                 \
    "listen \"127.0.0.1:8080\" {}\n"                                                                         \
    "redis { url = \"redis://127.0.0.1:6379\" }\n"                                                           \
    "upstream \"main\" { url = \"http://127.0.0.1:1\" api = \"openai\" }\n"                                  \
    "upstream \"claude\" { url = \"http://127.0.0.1:2\" api = \"anthropic\" }\n"                             \
    "upstream \"google\" { url = \"http://127.0.0.1:3\" api = \"gemini\" }\n"

#define ALL BASE "route \"/\" { upstream = \"main\" }\n"

static void find(const struct config *c, const char *text, struct route *r)
{
    struct http_head h = parse(text);

    if (!route_find(c, &h, r))
        fail_msg("no route: <%s>", text);
}

static void assert_slice(struct slice got, const char *want)
{
    if (!slice_eq(got, slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)got.n, got.n == 0 ? "" : got.p, want);
}

/* --- routes -------------------------------------------------------------------------------------------------------- */

static void test_the_longest_prefix_wins(void **state)
{
    static const struct {
        const char *target, *upstream; /* NULL: none */
    } rows[] = {
        {"/v1/messages", "claude"},
        {"/v1/messages/count_tokens", "claude"},
        {"/v1/message", "main"},
        {"/v1/", "main"},
        {"/v1", NULL},
        {"/V1/messages", NULL},
        {"/v1beta/models", "google"},
        {"/", NULL},
        {"/v1/%6dessages", "main"},
        {"/v1/messages?x=/v1beta", "claude"},
        {"/x?/v1/", NULL},
        {"/v1//messages", "main"},
    };
    struct config *c = load(BASE "route \"/v1/\" { upstream = \"main\" }\n"
                                 "route \"/v1beta\" { upstream = \"google\" }\n"
                                 "route \"/v1/messages\" { upstream = \"claude\" }\n");

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char text[256];
        struct route r;
        struct http_head h;
        bool found;

        snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: h\r\n\r\n", rows[i].target);
        h = parse(text);
        found = route_find(c, &h, &r);
        if (found != (rows[i].upstream != NULL) || (found && strcmp(r.upstream->name, rows[i].upstream) != 0))
            fail_msg("%s: %s", rows[i].target, found ? r.upstream->name : "none");
    }
    config_unref(c);
}

/* Bodies made here have the shape of the API that the path speaks, else of the upstream's. */
static void test_the_shape_of_errors(void **state)
{
    static const struct {
        const char *target;
        enum config_api api;
    } rows[] = {
        {"/v1/chat/completions", CONFIG_API_OPENAI},
        {"/v1/completions", CONFIG_API_OPENAI},
        {"/v1/responses", CONFIG_API_OPENAI},
        {"/v1/messages", CONFIG_API_ANTHROPIC},
        {"/v1/messages/batches", CONFIG_API_ANTHROPIC},
        {"/anthropic/v1/messages?beta=true", CONFIG_API_ANTHROPIC},
        {"/v1/threads/t_1/messages", CONFIG_API_OPENAI}, /* of the Assistants API */
        {"/v1beta/models/gemini-pro:generateContent", CONFIG_API_GEMINI},
        {"/v1/models/gemini-pro:generateContent", CONFIG_API_GEMINI},
        {"/v1/models", CONFIG_API_OPENAI},
        {"/elsewhere", CONFIG_API_OPENAI},
    };
    struct config *c = load(ALL);
    struct config *none = load(BASE "route \"/nowhere\" { upstream = \"google\" }\n");

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char text[256];
        struct http_head h;
        struct route r;

        snprintf(text, sizeof(text), "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n",
                 rows[i].target);
        find(c, text, &r);
        if (r.api != rows[i].api)
            fail_msg("%s: %u", rows[i].target, r.api);
        h = parse(text);
        assert_false(route_find(none, &h, &r)); /* the shape is known all the same */
        assert_int_equal(r.api, rows[i].api);
    }
    config_unref(c);
    config_unref(none);
}

/* --- the model ------------------------------------------------------------------------------------------------------ */

struct model_row {
    const char *head; /* without the line ends at its end */
    const char *model;
    enum route_model from;
    enum bodyscan_error error;
};

#define POST(target) "POST " target " HTTP/1.1\r\nHost: h\r\nContent-Length: 5"
#define GET(target) "GET " target " HTTP/1.1\r\nHost: h"
#define WS(target)                                                                                           \
    GET(target)                                                                                              \
    "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "      \
    "dGhlIHNhbXBsZSBub25jZQ=="
#define KNOWN(head, model)                                                                                   \
    {                                                                                                        \
        head, model, ROUTE_MODEL_KNOWN, BODYSCAN_E_OK                                                        \
    }
#define FROM(head, from)                                                                                     \
    {                                                                                                        \
        head, "", ROUTE_MODEL_##from, BODYSCAN_E_OK                                                          \
    }
#define BAD(head, error)                                                                                     \
    {                                                                                                        \
        head, NULL, ROUTE_MODEL_BAD, BODYSCAN_E_##error                                                      \
    }

static const struct model_row models[] = {
    /* in the body, always */
    FROM(POST("/v1/chat/completions"), REQUIRED),
    FROM(POST("/v1/completions"), REQUIRED),
    FROM(POST("/v1/responses"), REQUIRED),
    FROM(POST("/v1/embeddings"), REQUIRED),
    FROM(POST("/v1/messages"), REQUIRED),
    FROM(POST("/v1/messages?beta=true"), REQUIRED),
    FROM(POST("/v1/audio/speech"), REQUIRED),
    FROM(POST("/v1/audio/transcriptions"), REQUIRED),
    FROM(POST("/v1/audio/translations"), REQUIRED),
    FROM(POST("/any/prefix/v1/chat/completions"), REQUIRED),
    FROM("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked", REQUIRED),
    FROM("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0",
         REQUIRED), /* and will be missing */
    /* perhaps */
    FROM(POST("/v1/images/generations"), OPTIONAL),
    FROM(POST("/v1/messages/count_tokens"), OPTIONAL),
    FROM(POST("/v1/chat/completions/chatcmpl-1"), OPTIONAL),
    FROM(POST("/"), OPTIONAL),
    FROM("PUT /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5", OPTIONAL),
    FROM(POST("/v1/responses?model=x"), REQUIRED), /* the query does not count beside a body */
    /* never */
    FROM(GET("/v1/models"), NONE),
    FROM(GET("/v1/chat/completions"), NONE),
    FROM(GET("/v1/chat/completions?model=x"), NONE),
    FROM(POST("/v1/files"), NONE),
    FROM(POST("/v1/files/file-1/content"), NONE),
    FROM(POST("/v1/uploads/u-1/parts"), NONE),
    FROM(POST("/v1/batches"), NONE),
    FROM(POST("/v1/messages/batches"), NONE),
    FROM(POST("/v1/vector_stores/vs_1/search"), NONE),
    FROM(POST("/v1/containers"), NONE),
    FROM(POST("/v1/responses/resp_1/cancel"), NONE),
    FROM("DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: h", NONE),
    /* Gemini: before the last colon */
    KNOWN(POST("/v1beta/models/gemini-2.5-pro:generateContent"), "gemini-2.5-pro"),
    KNOWN(POST("/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse&key=K"), "gemini-2.5-pro"),
    KNOWN(POST("/v1/models/gemini-pro:countTokens"), "gemini-pro"),
    KNOWN(POST("/v1beta/tunedModels/x:generateContent"), "x"),
    KNOWN(POST("/v1beta/models/a:b:c:generateContent"), "a:b:c"),
    KNOWN(POST("/v1beta/models/a%2Fb%3Ac:generateContent"), "a/b:c"),
    KNOWN(POST("/v1beta/models/a/b:generateContent"), "a/b"),
    KNOWN(POST("/v1beta/models/models:generateContent"), "models"),
    BAD(POST("/v1beta/models/:generateContent"), MODEL_EMPTY),
    BAD(POST("/v1beta/models/a%zz:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/a%4:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/a%00:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/a%0A:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/a%ff:generateContent"), MODEL_INVALID),
    KNOWN(POST("/v1beta/models/%C3%A9:generateContent"), "\xc3\xa9"),
    KNOWN(POST("/v1beta/models/a%2541:generateContent"), "a%41"), /* once */
    KNOWN(POST("/v1beta/models/a+b:generateContent"), "a+b"),
    FROM(GET("/v1beta/models/gemini-2.5-pro"), NONE),
    FROM(GET("/v1beta/models?pageSize=50"), NONE),
    /* a look-up of a fine-tuned model, whose name holds colons, is no call of it */
    FROM(GET("/v1/models/ft:gpt-4o-mini:acme::AbC1"), NONE),
    FROM("DELETE /v1/models/ft:gpt-4o-mini:acme::AbC1 HTTP/1.1\r\nHost: h", NONE),
    /* Vertex */
    KNOWN(POST("/v1/projects/p/locations/l/publishers/google/models/gemini-2.5-pro:streamGenerateContent"),
          "gemini-2.5-pro"),
    KNOWN(POST("/v1/projects/p/locations/l/publishers/anthropic/models/claude-x@20250101:rawPredict"),
          "claude-x@20250101"),
    /* Azure: the path wins over the body */
    KNOWN(POST("/openai/deployments/dep-1/chat/completions?api-version=1"), "dep-1"),
    KNOWN(POST("/openai/deployments/my%20dep/embeddings"), "my dep"),
    KNOWN(POST("/openai/deployments/files/chat/completions"), "files"),
    FROM(POST("/openai/deployments"), OPTIONAL),
    FROM(POST("/openai/deployments/dep-1"), OPTIONAL), /* nothing is asked of it */
    /* Bedrock: one decoding */
    KNOWN(POST("/model/anthropic.claude-3-sonnet-v1%3A0/invoke"), "anthropic.claude-3-sonnet-v1:0"),
    KNOWN(POST("/model/anthropic.claude-3-sonnet-v1:0/invoke-with-response-stream"),
          "anthropic.claude-3-sonnet-v1:0"),
    KNOWN(POST("/model/arn%3Aaws%3Abedrock%3Aus%3A1%3Aprofile%2Fx/converse"),
          "arn:aws:bedrock:us:1:profile/x"),
    FROM(POST("/v1/model/x/invoke"), OPTIONAL), /* not first: somebody else's */
    FROM(POST("/model/x"), OPTIONAL),
    /* a word in disguise is what a server that decodes takes it for */
    KNOWN(POST("/v1beta/%6dodels/g:generateContent"), "g"),
    KNOWN(POST("/v1beta/models/g%3AgenerateContent"), "g"),
    KNOWN(POST("/v1beta/models/a%3Ab%3agenerateContent"), "a:b"),
    KNOWN(POST("/v1beta/models//g:generateContent"), "g"),
    KNOWN(POST("/v1beta%2Fmodels%2fg:generateContent"), "g"),
    KNOWN(POST("/v1beta;a=b/models;c/g:generateContent"), "g"),
    KNOWN(POST("/openai/Deployments/dep-1/chat/completions"), "dep-1"),
    KNOWN(POST("/openai/deployment%73//dep-1/chat/completions"), "dep-1"),
    KNOWN(POST("//model/x/invoke"), "x"),
    KNOWN(POST("/%4dodel//x/invoke"), "x"),
    FROM(POST("/v1/chat/complet%69ons"), REQUIRED),
    FROM(POST("//v1//chat/completions"), REQUIRED),
    FROM(POST("/v1%2Fchat%2Fcompletions"), REQUIRED),
    FROM(POST("/v1/chat/completions;x=y"), REQUIRED),
    /* where servers may read another path, the body is looked at, and a model in it is none */
    FROM(POST("/v1/files/../chat/completions"), REQUIRED),
    FROM(POST("/v1/files/%2E%2e/chat/completions"), REQUIRED),
    FROM(POST("/v1/files/..;/chat/completions"), REQUIRED),
    FROM(POST("/v1/files/..%2Fchat%2Fcompletions"), REQUIRED),
    FROM(POST("/v1/files\\..\\chat/completions"), REQUIRED),
    FROM(POST("/v1/files/averyveryverylongname\\..\\..\\messages"), OPTIONAL),
    FROM(POST("/v1/responses//"), OPTIONAL),
    FROM(POST("/v1/responses/."), OPTIONAL),
    FROM(POST("/v1/responses/"), REQUIRED),
    FROM(POST("//v1/files"), OPTIONAL),
    FROM(POST("/v1/files/.hidden/..."), NONE),
    BAD(POST("/v1beta/models/cheap/../g:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/./g:generateContent"), MODEL_INVALID),
    BAD(POST("/openai/deployments/cheap/%2e%2e/g/chat/completions"), MODEL_INVALID),
    BAD(POST("/model/cheap/../g/invoke"), MODEL_INVALID),
    BAD(POST("/v1beta/models/g;x:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/g/:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/g%2f:generateContent"), MODEL_INVALID),
    BAD(POST("/v1beta/models/%2Fg:generateContent"), MODEL_INVALID),
    BAD(POST("/openai/deployments/g;x/chat/completions"), MODEL_INVALID),
    BAD(POST("/openai/deployments/g%2fchat/completions"), MODEL_INVALID),
    /* WebSocket: the query */
    KNOWN(WS("/v1/realtime?model=gpt-4o-realtime"), "gpt-4o-realtime"),
    KNOWN(WS("/v1/realtime?a=b&model=gpt%2D4o&c"), "gpt-4o"),
    KNOWN(WS("/v1/realtime?mod%65l=x"), "x"),
    KNOWN(WS("/v1/realtime?models=y&model=x&Model=z"), "x"),
    KNOWN(WS("/v1/realtime?=1&&%zz=2&model=x&"), "x"),
    FROM(WS("/v1/realtime"), NONE),
    FROM(WS("/v1/realtime?"), NONE),
    FROM(WS("/v1/realtime?deployment=x"), NONE),
    BAD(WS("/v1/realtime?model=x&model=x"), MODEL_DUPLICATE),
    BAD(WS("/v1/realtime?model=x&mod%65l=y"), MODEL_DUPLICATE),
    BAD(WS("/v1/realtime?model="), MODEL_EMPTY),
    BAD(WS("/v1/realtime?model"), MODEL_EMPTY),
    BAD(WS("/v1/realtime?model=%"), MODEL_INVALID),
};

static void test_where_the_model_stands(void **state)
{
    struct config *c = load(ALL);

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        const struct model_row *row = &models[i];
        char text[1024];
        struct route r;

        snprintf(text, sizeof(text), "%s\r\n\r\n", row->head);
        find(c, text, &r);
        if (r.model_from != row->from || (row->from == ROUTE_MODEL_BAD && r.model_error != row->error))
            fail_msg("<%s>: %u, error %u", row->head, r.model_from, r.model_error);
        if (row->model != NULL)
            assert_slice(model_name_slice(&r.model), row->model);
        assert_false(r.scan); /* no limit asks */
    }
    config_unref(c);
}

static void test_a_name_may_be_so_long(void **state)
{
    struct config *c = load(ALL);
    char name[300], text[512];
    struct route r;

    (void)state;
    memset(name, 'm', sizeof(name));
    snprintf(text, sizeof(text), "POST /v1/models/%.256s:x HTTP/1.1\r\nHost: h\r\n\r\n", name);
    find(c, text, &r);
    assert_int_equal(model_name_slice(&r.model).n, 256);
    snprintf(text, sizeof(text), "POST /v1/models/%.257s:x HTTP/1.1\r\nHost: h\r\n\r\n", name);
    find(c, text, &r);
    assert_int_equal(r.model_from, ROUTE_MODEL_BAD);
    assert_int_equal(r.model_error, BODYSCAN_E_MODEL_TOO_LONG);
    config_unref(c);
}

static void test_a_header_may_name_the_model(void **state)
{
    struct config *c = load(ALL "client { model_header = \"X-Model\" }\n");
    struct route r;

    (void)state;
    find(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nx-model: gpt-4o\r\n\r\n",
         &r);
    assert_int_equal(r.model_from, ROUTE_MODEL_KNOWN);
    assert_slice(model_name_slice(&r.model), "gpt-4o");
    find(c, "POST /v1beta/models/path:x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nx-model: header\r\n\r\n",
         &r);
    assert_slice(model_name_slice(&r.model), "path"); /* the upstream will go by its own path */
    find(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nx-model:\r\n\r\n", &r);
    assert_int_equal(r.model_from, ROUTE_MODEL_BAD);
    config_unref(c);
}

/* --- scanning ------------------------------------------------------------------------------------------------------ */

static void check_scan(const char *limits, const char *head, bool scan)
{
    char text[1024], conf[4096];
    struct config *c;
    struct route r;

    snprintf(conf, sizeof(conf),
             ALL "route \"/claude\" { upstream = \"claude\" }\ntenant { from = \"header:x-tenant\" }\n%s",
             limits);
    c = load(conf);
    snprintf(text, sizeof(text), "%s\r\n\r\n", head);
    find(c, text, &r);
    if (r.scan != scan)
        fail_msg("<%s> under <%s>", head, limits);
    config_unref(c);
}

static void test_bodies_are_scanned_only_where_a_limit_asks(void **state)
{
    (void)state;
    check_scan("limit \"a\" { concurrency = 1 }\n", POST("/v1/chat/completions"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} }\n", POST("/v1/chat/completions"), true);
    check_scan("limit \"a\" { concurrency = 1 per = {\"model\"} }\n", POST("/v1/images/generations"), true);
    check_scan("limit \"a\" { concurrency = 1 per = {\"tenant\"} }\n", POST("/v1/chat/completions"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} }\n", POST("/v1/files"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} }\n", GET("/v1/models"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} }\n", POST("/v1/models/x:y"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} upstream = {\"claude\"} }\n",
               POST("/v1/chat/completions"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} upstream = {\"claude\"} }\n",
               POST("/claude/v1/messages"), true);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} tenant = {\"acme-*\"} }\n",
               POST("/v1/messages"), false);
    check_scan("limit \"a\" { concurrency = 1 model = {\"x\"} tenant = {\"acme-*\"} }\n",
               POST("/v1/messages") "\r\nx-tenant: acme-1", true);
}

/* --- the tenant ----------------------------------------------------------------------------------------------------- */

static void check_tenant(const char *conf, const char *fields_text, const char *want)
{
    char text[1024], whole[4096];
    struct config *c;
    struct route r;

    snprintf(whole, sizeof(whole), ALL "%s", conf);
    c = load(whole);
    snprintf(text, sizeof(text), "GET / HTTP/1.1\r\nHost: h\r\n%s\r\n", fields_text);
    find(c, text, &r);
    assert_slice(r.tenant, want);
    config_unref(c);
}

static void test_tenant_from_a_header(void **state)
{
    static const char plain[] = "tenant { from = \"header:X-Tenant-Id\" }\n";
    static const char mapped[] =
        "tenant { from = \"header:x-tenant-id\" map \"acme-staging\" { to = \"acme\" } }\n";

    (void)state;
    check_tenant(plain, "x-tenant-id: acme\r\n", "acme");
    check_tenant(plain, "X-TENANT-ID:   a c:me/\t\r\n", "a c:me/");
    check_tenant(plain, "x-tenant: acme\r\n", "");
    check_tenant(plain, "x-tenant-id:\r\n", "");
    check_tenant(plain, "x-tenant-id: one\r\nx-tenant-id: two\r\n", "one");
    check_tenant(mapped, "x-tenant-id: acme-staging\r\n", "acme");
    check_tenant(mapped, "x-tenant-id: acme-stagin\r\n", "acme-stagin");
    check_tenant("", "x-tenant-id: acme\r\n", "");
}

/* A key is a secret: what goes on from here is its hash, or the name that the file gives it by key or by hash. */
/* Who counts a call by one of two lines, while the upstream goes by the other, counts it in a wrong place. */
static void test_a_header_given_twice_is_ambiguous(void **state)
{
    static const char tenant[] = "tenant { from = \"header:x-tenant-id\" }\n",
                      key[] = "tenant { from = \"key\" }\n";
    static const struct {
        const char *conf, *fields;
        bool ambiguous;
    } rows[] = {
        {tenant, "x-tenant-id: a\r\n", false},
        {tenant, "x-tenant-id: a\r\nX-Tenant-Id: b\r\n", true},
        {tenant, "x-tenant-id: a\r\nx: b\r\nx: c\r\n", false},
        {key, "authorization: a\r\nauthorization: b\r\n", true},
        {key, "authorization: a\r\nx-api-key: b\r\n", false},
        {"client { model_header = \"x-model\" }\n", "x-model: a\r\nX-MODEL: a\r\n", true},
        {"", "x-tenant-id: a\r\nx-tenant-id: b\r\n", false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char conf[512], text[512];
        struct config *c;
        struct route r;

        snprintf(conf, sizeof(conf), ALL "%s", rows[i].conf);
        c = load(conf);
        snprintf(text, sizeof(text), "POST /v1/x HTTP/1.1\r\nHost: h\r\n%s\r\n", rows[i].fields);
        find(c, text, &r);
        assert_int_equal(r.ambiguous, rows[i].ambiguous);
        config_unref(c);
    }
}

static void test_the_key_that_the_api_reads_comes_first(void **state)
{
    static const char *const heads[] = {
        "POST /v1/messages HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer noise\r\nx-api-key: real\r\n\r\n",
        "POST /v1beta/models/m:x HTTP/1.1\r\nHost: h\r\nx-api-key: noise\r\nx-goog-api-key: real\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nx-api-key: noise\r\nAuthorization: real\r\n\r\n",
        "POST /openai/deployments/m/x HTTP/1.1\r\nHost: h\r\nx-api-key: noise\r\napi-key: real\r\n\r\n",
        "POST /openai/deployments/m/x HTTP/1.1\r\nHost: h\r\nAuthorization: \r\napi-key: real\r\n\r\n"};
    struct config *c = load(ALL "tenant { from = \"key\" }\n");
    char hash[64] = "key-";

    (void)state;
    hash_stable_hex(SLICE("real"), hash + 4);
    hash[36] = '\0';
    for (size_t i = 0; i < ARRAY_LEN(heads); i++) {
        struct route r;

        find(c, heads[i], &r);
        assert_slice(r.tenant, hash);
    }
    config_unref(c);
}

static void test_tenant_from_the_key(void **state)
{
    static const char plain[] = "tenant { from = \"key\" }\n";
    char hash[64] = "key-", conf[512];

    (void)state;
    hash_stable_hex(SLICE("sk-secret"), hash + 4);
    hash[36] = '\0';
    check_tenant(plain, "authorization: Bearer sk-secret\r\n", hash);
    check_tenant(plain, "Authorization: bearer   sk-secret \r\n", hash);
    check_tenant(plain, "Authorization: Bearer\tsk-secret\r\n", hash);
    check_tenant(plain, "authorization: sk-secret\r\n", hash);
    check_tenant(plain, "x-api-key: sk-secret\r\n", hash);
    check_tenant(plain, "api-key: sk-secret\r\n", hash);
    check_tenant(plain, "x-goog-api-key: sk-secret\r\n", hash);
    check_tenant(plain, "x-api-key: other\r\nauthorization: Bearer sk-secret\r\n",
                 hash); /* one order, whatever is sent */
    check_tenant(plain, "", "");
    check_tenant(plain, "cookie: sk-secret\r\n", "");
    check_tenant("tenant { from = \"key\" map \"sk-secret\" { to = \"acme\" } }\n",
                 "x-api-key: sk-secret\r\n", "acme");
    snprintf(conf, sizeof(conf), "tenant { from = \"key\" map \"%s\" { to = \"acme\" } }\n", hash);
    check_tenant(conf, "x-api-key: sk-secret\r\n", "acme");
    hash_stable_hex(SLICE("sk-secreT"), hash + 4);
    check_tenant(conf, "x-api-key: sk-secreT\r\n", hash);
}

/* --- scopes --------------------------------------------------------------------------------------------------------- */

/* "name=cap name=cap …" of the call, in order. */
static void check_scopes(const char *limits, const char *head, const char *want)
{
    char conf[8192], text[1024], got[2048] = "";
    struct lease_scope scopes[LEASE_SCOPES_MAX];
    size_t at = 0;
    struct config *c;
    struct route r;
    int n;

    snprintf(conf, sizeof(conf),
             ALL "route \"/claude\" { upstream = \"claude\" }\ntenant { from = \"header:x-tenant\" }\n%s",
             limits);
    c = load(conf);
    snprintf(text, sizeof(text), "%s\r\n\r\n", head);
    find(c, text, &r);
    n = route_scopes(c, &r, scopes);
    if (n < 0)
        snprintf(got, sizeof(got), "too many");
    for (int i = 0; i < n; i++)
        at += (size_t)snprintf(got + at, sizeof(got) - at, "%s%.*s=%u", i == 0 ? "" : " ",
                               (int)scopes[i].name_n, scopes[i].name, scopes[i].cap);
    for (int i = 1; i < n; i++)
        assert_true(scopes[i].limit > scopes[i - 1].limit);
    if (strcmp(got, want) != 0)
        fail_msg("<%s> under <%s>: <%s> instead of <%s>", head, limits, got, want);
    config_unref(c);
}

#define MODEL(name) POST("/v1/models/" name ":x")
#define TENANT(t) "\r\nx-tenant: " t

static void test_scopes(void **state)
{
    static const char limits[] =
        "limit \"four\" { model = {\"gpt-4o\", \"gpt-4o-*\"} concurrency = 200 }\n"
        "limit \"tenants\" { per = {\"tenant\"} concurrency = 20 override \"acme\" { concurrency = 60 } }\n"
        "limit \"claude\" { upstream = {\"claude\"} concurrency = 7 }\n"
        "limit \"both\" { per = {\"tenant\", \"model\"} model = {\"x*\"} concurrency = 3 }\n"
        "limit \"each\" { per = {\"model\"} tenant = {\"b*\"} concurrency = 4 override \"gpt-4o\" { "
        "concurrency = 0 } }\n"
        "limit \"account\" { concurrency = 500 }\n";

    (void)state;
    check_scopes("", GET("/"), "");
    check_scopes(limits, MODEL("gpt-4o") TENANT("acme"), "four=200 tenants/acme=60 account=500");
    check_scopes(limits, MODEL("GPT-4o") TENANT("acme"),
                 "four=200 tenants/acme=60 account=500"); /* case is not heeded */
    check_scopes(limits, MODEL("gpt-4o-mini") TENANT("other"), "four=200 tenants/other=20 account=500");
    check_scopes(limits, MODEL("gpt-4") TENANT("other"), "tenants/other=20 account=500");
    check_scopes(limits, MODEL("GPT-4o") TENANT("ACME"), "four=200 tenants/ACME=20 account=500");
    check_scopes(limits, MODEL("x1") TENANT("acme"), "tenants/acme=60 both/x1/acme=3 account=500");
    check_scopes(limits, MODEL("gpt-4o") TENANT("bob"), "four=200 tenants/bob=20 each/gpt-4o=0 account=500");
    check_scopes(limits, MODEL("y") TENANT("bob"), "tenants/bob=20 each/y=4 account=500");
    check_scopes(limits, GET("/v1/models") TENANT("bob"),
                 "tenants/bob=20 account=500"); /* no model: limits that ask for one pass it */
    check_scopes(limits, POST("/claude/v1/files") TENANT("carl"), "tenants/carl=20 claude=7 account=500");
}

/* Values that are long or unusual stand as their hash: none leaves its scope, and none poses as a hash. */
static void test_odd_values_are_hashed(void **state)
{
    static const char *const odd[] = {
        "a/b", "a b", "a:b", "{tag}", "*", "\xc3\xa9", "h-0123456789abcdef0123456789abcdef", "a#1", ""};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(odd); i++) {
        char head[256], want[128] = "t/h-";

        snprintf(head, sizeof(head), GET("/") TENANT("%s"), odd[i]);
        hash_stable_hex(slice_of(odd[i]), want + 4);
        snprintf(want + 36, sizeof(want) - 36, "=1");
        check_scopes("limit \"t\" { per = {\"tenant\"} concurrency = 1 }\n", head, want);
    }
    check_scopes("limit \"t\" { per = {\"tenant\"} concurrency = 1 }\n", GET("/") TENANT("A-z_0.9"),
                 "t/A-z_0.9=1");
    check_scopes("limit \"t\" { per = {\"tenant\"} concurrency = 1 }\n", GET("/") TENANT("h"), "t/h=1");
}

static void test_the_longest_names_fit(void **state)
{
    char limits[512], head[512], want[512], model[200], tenant[200], hash[2][33] = {""};

    (void)state;
    memset(model, 'm', sizeof(model));
    memset(tenant, 't', sizeof(tenant));
    hash_stable_hex((struct slice){model, 199}, hash[0]);
    hash_stable_hex((struct slice){tenant, 199}, hash[1]);
    snprintf(limits, sizeof(limits), "limit \"%.64s\" { per = {\"tenant\", \"model\"} concurrency = 1 }\n",
             model);
    snprintf(head, sizeof(head), "POST /v1/models/%.199s:x HTTP/1.1\r\nHost: h\r\nx-tenant: %.199s", model,
             tenant);
    snprintf(want, sizeof(want), "%.64s/h-%s/h-%s=1", model, hash[0], hash[1]);
    check_scopes(limits, head, want);
    for (size_t n = 1; n <= 64; n++) { /* as they are: always */
        snprintf(head, sizeof(head), "POST /v1/models/%.*s:x HTTP/1.1\r\nHost: h\r\nx-tenant: %.*s", (int)n,
                 model, (int)n, tenant);
        snprintf(want, sizeof(want), "%.64s/%.*s/%.*s=1", model, (int)n, model, (int)n, tenant);
        check_scopes(limits, head, want);
    }
}

static void test_more_limits_than_one_call_can_have(void **state)
{
    char limits[4096] = "";
    size_t at = 0;

    (void)state;
    for (int i = 0; i < LEASE_SCOPES_MAX; i++)
        at += (size_t)snprintf(limits + at, sizeof(limits) - at, "limit \"l%d\" { concurrency = 1 }\n", i);
    check_scopes(limits, GET("/"), "l0=1 l1=1 l2=1 l3=1 l4=1 l5=1 l6=1 l7=1");
    snprintf(limits + at, sizeof(limits) - at, "limit \"x\" { concurrency = 1 model = {\"m\"} }\n");
    check_scopes(limits, GET("/"), "l0=1 l1=1 l2=1 l3=1 l4=1 l5=1 l6=1 l7=1");
    check_scopes(limits, MODEL("m"), "too many");
}

/* --- for the log ----------------------------------------------------------------------------------------------------- */

static void check_shown(const char *target, const char *want)
{
    char out[512];

    assert_slice(route_loggable_target(slice_of(target), out, sizeof(out)), want);
    for (size_t n = 0; n <= strlen(want); n++) { /* in too little room: its beginning, and not a byte more */
        struct slice got;

        memset(out, 0x55, sizeof(out));
        got = route_loggable_target(slice_of(target), out, n);
        assert_int_equal(got.n, n);
        assert_memory_equal(got.p, want, n);
        assert_int_equal(out[n], 0x55);
    }
}

static void test_secrets_do_not_reach_the_log(void **state)
{
    (void)state;
    check_shown("/v1/models", "/v1/models");
    check_shown("/v1/models?", "/v1/models");
    check_shown("/x?alt=sse&key=AIza-secret", "/x?alt=sse&key=***");
    check_shown("/x?api-key=s&api-version=2024&access_token=t&sig=u",
                "/x?api-key=***&api-version=2024&access_token=***&sig=***");
    check_shown("/x?KEY=s&k%65y=s&unknown=s", "/x?KEY=***&k%65y=***&unknown=***");
    check_shown("/x?model=gpt&stream=true&flag", "/x?model=gpt&stream=true&flag");
    check_shown("/x?key=a=b?c&limit=1", "/x?key=***&limit=1");
    check_shown("/x?key=", "/x?key=***");
    check_shown("/x?=s", "/x?=***");
    check_shown("", "");
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_the_longest_prefix_wins, no_blocks),
        cmocka_unit_test_teardown(test_the_shape_of_errors, no_blocks),
        cmocka_unit_test_teardown(test_where_the_model_stands, no_blocks),
        cmocka_unit_test_teardown(test_a_name_may_be_so_long, no_blocks),
        cmocka_unit_test_teardown(test_a_header_may_name_the_model, no_blocks),
        cmocka_unit_test_teardown(test_bodies_are_scanned_only_where_a_limit_asks, no_blocks),
        cmocka_unit_test_teardown(test_tenant_from_a_header, no_blocks),
        cmocka_unit_test_teardown(test_tenant_from_the_key, no_blocks),
        cmocka_unit_test_teardown(test_a_header_given_twice_is_ambiguous, no_blocks),
        cmocka_unit_test_teardown(test_the_key_that_the_api_reads_comes_first, no_blocks),
        cmocka_unit_test_teardown(test_scopes, no_blocks),
        cmocka_unit_test_teardown(test_odd_values_are_hashed, no_blocks),
        cmocka_unit_test_teardown(test_the_longest_names_fit, no_blocks),
        cmocka_unit_test_teardown(test_more_limits_than_one_call_can_have, no_blocks),
        cmocka_unit_test_teardown(test_secrets_do_not_reach_the_log, no_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
