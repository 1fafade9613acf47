/*
 * route.c - routing, tenant, model from the head, scopes.
 *
 * Where the model stands, by API:
 *   Gemini      /v1beta/models/NAME:verb, /v1/models/NAME:verb      between "models/" and the last ':', in a POST
 *   Vertex      …/publishers/P/models/NAME:verb                     likewise
 *   Azure       /openai/deployments/NAME/…                          the path wins over the body
 *   Bedrock     /model/NAME/invoke…                                 percent-decoded once
 *   WebSocket   ?model=NAME                                         there is no body
 *   the rest    in the body
 */
#include "route.h"

#include "hash.h"

/* --- small cuts ---------------------------------------------------------------------------------------- */

static struct slice path_of(struct slice target)
{
    return (struct slice){target.p, slice_find(target, '?')};
}

static struct slice query_of(struct slice target)
{
    size_t q = slice_find(target, '?');

    return q == target.n ? (struct slice){NULL, 0} : (struct slice){target.p + q + 1, target.n - q - 1};
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = ascii_lower(c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes %XX once ('+' stays: that is form encoding). A broken escape is an error: two readers would differ. */
static enum bodyscan_error decode_name(struct slice s, struct model_name *out)
{
    enum bodyscan_error e;

    model_name_init(out);
    for (size_t i = 0; i < s.n; i++) {
        uint8_t c = (uint8_t)s.p[i];

        if (c == '%') {
            int high = i + 2 < s.n ? hex_digit(s.p[i + 1]) : -1;
            int low = i + 2 < s.n ? hex_digit(s.p[i + 2]) : -1;

            if (high < 0 || low < 0)
                return BODYSCAN_E_MODEL_INVALID;
            c = (uint8_t)(high << 4 | low);
            i += 2;
        }
        e = model_name_put(out, c);
        if (e != BODYSCAN_E_OK)
            return e;
    }
    return model_name_finish(out);
}

/* The first field of that name; a second one makes the call ambiguous. */
static const struct http_field *only_field(const struct http_head *h, const char *name, struct route *r)
{
    const struct http_field *first = http_find_name(h, slice_of(name));

    for (size_t i = 0; first != NULL && i < h->n_fields; i++)
        r->ambiguous |= &h->fields[i] != first && slice_ieq(http_name(h, &h->fields[i]), slice_of(name));
    return first;
}

/* --- the model ------------------------------------------------------------------------------------------- */

/* As it stands: a field's value is not encoded. */
static enum bodyscan_error copy_name(struct slice s, struct model_name *out)
{
    enum bodyscan_error e = BODYSCAN_E_OK;

    model_name_init(out);
    for (size_t i = 0; i < s.n && e == BODYSCAN_E_OK; i++)
        e = model_name_put(out, (uint8_t)s.p[i]);
    return e == BODYSCAN_E_OK ? model_name_finish(out) : e;
}

static void model_is(struct route *r, struct slice raw, bool encoded)
{
    r->model_error = encoded ? decode_name(raw, &r->model) : copy_name(raw, &r->model);
    r->model_from = r->model_error == BODYSCAN_E_OK ? ROUTE_MODEL_KNOWN : ROUTE_MODEL_BAD;
}

/* What the words of a path tell. One walk over it serves every question. */
struct path_facts {
    struct slice model; /* named in the path; raw */
    bool names_model;
    bool deployment; /* by Azure's word: a name without slashes */
    bool post;
    bool required;   /* the body of a POST always names a model */
    bool impossible; /* files, and things handled by id: bodies without a model, perhaps huge */
    bool dots;       /* `.` or `..` among its words: some servers resolve them, some do not */
    bool crooked;    /* that, or an empty word, a parameter, a backslash: servers may read other words */
    bool anthropic, gemini, openai;
};

enum word {
    WORD_OTHER,
    WORD_FILES, /* and its like: nothing with a model below it */
    WORD_REQUIRED,
    WORD_MODELS,
    WORD_MODEL,
    WORD_DEPLOYMENTS,
    WORD_MESSAGES,
    WORD_RESPONSES,
    WORD_COMPLETIONS,
    WORD_V1BETA,
    WORD_V1,
};

static enum word word_of(struct slice s)
{
    static const struct {
        struct slice text;
        enum word word;
    } table[] = {
        {{"v1", 2}, WORD_V1},
        {{"completions", 11}, WORD_COMPLETIONS},
        {{"messages", 8}, WORD_MESSAGES},
        {{"responses", 9}, WORD_RESPONSES},
        {{"embeddings", 10}, WORD_REQUIRED},
        {{"speech", 6}, WORD_REQUIRED},
        {{"transcriptions", 14}, WORD_REQUIRED},
        {{"translations", 12}, WORD_REQUIRED},
        {{"models", 6}, WORD_MODELS},
        {{"tunedModels", 11}, WORD_MODELS},
        {{"model", 5}, WORD_MODEL},
        {{"deployments", 11}, WORD_DEPLOYMENTS},
        {{"v1beta", 6}, WORD_V1BETA},
        {{"files", 5}, WORD_FILES},
        {{"uploads", 7}, WORD_FILES},
        {{"batches", 7}, WORD_FILES},
        {{"vector_stores", 13}, WORD_FILES},
        {{"containers", 10}, WORD_FILES},
    };

    for (size_t i = 0; i < ARRAY_LEN(table); i++)
        if (slice_ieq(table[i].text, s)) /* Azure heeds no case */
            return table[i].word;
    return WORD_OTHER;
}

#define WORD_MAX_BYTES 16

/*
 * A word as a server reads it that decodes escapes and cuts parameters off; raw where it is longer than any that
 * means something here.
 */
static struct slice plain_word(struct slice raw, char out[WORD_MAX_BYTES], struct path_facts *f)
{
    size_t n = 0, i;

    for (i = 0; i < raw.n && raw.p[i] != ';'; i++) {
        int high = raw.p[i] == '%' && i + 2 < raw.n ? hex_digit(raw.p[i + 1]) : -1;
        int low = high >= 0 ? hex_digit(raw.p[i + 2]) : -1;
        char c = low >= 0 ? (char)(high << 4 | low) : raw.p[i];

        f->crooked |= c == '\\';
        if (n < WORD_MAX_BYTES)
            out[n] = c;
        n++;
        i += low >= 0 ? 2 : 0;
    }
    f->crooked |= i < raw.n;
    return n > WORD_MAX_BYTES ? raw : (struct slice){out, n};
}

/* Where a word ends: an escaped slash is one too for servers that decode before they split. */
static size_t word_end(struct slice path, size_t *skip)
{
    for (size_t i = 0; i < path.n; i++) {
        bool escaped = path.p[i] == '%' && i + 2 < path.n && path.p[i + 1] == '2' &&
                       ascii_lower(path.p[i + 2]) == 'f';

        if (path.p[i] != '/' && !escaped)
            continue;
        *skip = i + (escaped ? 3 : 1);
        return i;
    }
    *skip = path.n;
    return path.n;
}

static bool starts_with_escaped_colon(struct slice s, size_t at)
{
    return at + 2 < s.n && s.p[at] == '%' && s.p[at + 1] == '3' && ascii_lower(s.p[at + 2]) == 'a';
}

/* Gemini and Vertex: NAME may hold slashes (tuned models) and colons; the verb stands behind the last one. */
static void model_before_verb(struct slice rest, struct path_facts *f)
{
    size_t colon = rest.n;

    while (colon > 0 && rest.p[colon - 1] != ':' && !starts_with_escaped_colon(rest, colon - 1))
        colon--;
    if (colon == 0)
        return; /* /v1/models/NAME: a look-up, not a call of the model */
    f->model = (struct slice){rest.p, colon - 1};
    f->names_model = true;
    f->gemini = true;
}

/* Azure and Bedrock: the next word, where something follows it. */
static void model_in_next_word(struct slice rest, struct path_facts *f)
{
    size_t n = slice_find(rest, '/');

    if (n == 0 || n == rest.n)
        return;
    f->model = (struct slice){rest.p, n};
    f->names_model = true;
}

static void heed_word(enum word word, enum word before, bool first, struct slice rest, struct path_facts *f)
{
    bool last = rest.n == 0;

    while (rest.n > 0 && rest.p[0] == '/') /* of a doubled slash: no name begins with one */
        rest.p++, rest.n--;
    switch (word) {
    case WORD_FILES:
        f->impossible = true;
        break;
    case WORD_REQUIRED:
        f->required = last;
        break;
    case WORD_COMPLETIONS:
        f->required = f->openai = last;
        break;
    case WORD_RESPONSES:
        f->required = f->openai = last;
        f->impossible |= !last;
        break;
    case WORD_MESSAGES:
        f->anthropic = before == WORD_V1;
        f->required = last && f->anthropic;
        break;
    case WORD_MODELS:
        if (!f->names_model && f->post) /* a GET of ft:NAME:ORG::ID is a look-up, and its colons no verb's */
            model_before_verb(rest, f);
        break;
    case WORD_MODEL:
        if (first)
            model_in_next_word(rest, f);
        break;
    case WORD_DEPLOYMENTS:
        if (!f->names_model) {
            model_in_next_word(rest, f);
            f->deployment = f->names_model;
        }
        break;
    case WORD_V1BETA:
        f->gemini = true;
        break;
    case WORD_V1:
    case WORD_OTHER:
        break;
    }
}

static struct path_facts read_path(struct slice path, bool post)
{
    struct path_facts f = {.post = post};
    enum word before = WORD_OTHER;
    bool first = true;

    if (path.n > 0 && path.p[0] == '/')
        path.p++, path.n--;
    while (path.n > 0) {
        char plain[WORD_MAX_BYTES];
        size_t skip, n = word_end(path, &skip);
        struct slice text = plain_word((struct slice){path.p, n}, plain, &f);
        enum word word = word_of(text);

        f.dots |= slice_eq(text, SLICE(".")) || slice_eq(text, SLICE(".."));
        path.p += skip;
        path.n -= skip;
        f.crooked |= f.dots || text.n == 0;
        if (word != WORD_OTHER)
            heed_word(word, before, first, path, &f);
        before = word;
        first &= text.n == 0;
    }
    return f;
}

/* Keys are decoded before they are compared; a second `model` is an error, since servers differ (cases H085). */
static void model_in_query(struct route *r, struct slice query)
{
    bool found = false;

    while (query.n > 0) {
        size_t end = slice_find(query, '&');
        struct slice pair = {query.p, end};
        size_t equals = slice_find(pair, '=');
        struct model_name key;

        query.p += end == query.n ? end : end + 1;
        query.n -= end == query.n ? end : end + 1;
        if (decode_name((struct slice){pair.p, equals}, &key) != BODYSCAN_E_OK ||
            !slice_eq(model_name_slice(&key), SLICE("model")))
            continue;
        if (found) {
            r->model_from = ROUTE_MODEL_BAD;
            r->model_error = BODYSCAN_E_MODEL_DUPLICATE;
            return;
        }
        found = true;
        model_is(r,
                 equals == pair.n ? (struct slice){NULL, 0}
                                  : (struct slice){pair.p + equals + 1, pair.n - equals - 1},
                 true);
        if (r->model_from == ROUTE_MODEL_BAD)
            return;
    }
}

/* With a parameter, or an empty word at an end. */
static bool is_crooked_name(struct slice raw)
{
    size_t skip = 0;

    if (slice_find(raw, ';') < raw.n || (raw.n > 0 && raw.p[raw.n - 1] == '/'))
        return true;
    if (raw.n > 0 && word_end(raw, &skip) == 0)
        return true;
    return raw.n >= 3 && word_end((struct slice){raw.p + raw.n - 3, 3}, &skip) == 0;
}

static void find_model(const struct config *c, const struct http_head *h, const struct path_facts *facts,
                       struct route *r)
{
    const struct http_field *field = c->model_header[0] == '\0' ? NULL : only_field(h, c->model_header, r);
    bool required = h->method == HTTP_POST && facts->required;

    r->model_from = ROUTE_MODEL_NONE;
    if (facts->names_model && (facts->dots || is_crooked_name(facts->model))) {
        r->model_from = ROUTE_MODEL_BAD; /* a server that resolves it may see another one */
        r->model_error = BODYSCAN_E_MODEL_INVALID;
    } else if (facts->names_model) {
        model_is(r, facts->model, true);
        if (facts->deployment && memchr(r->model.bytes_, '/', model_name_slice(&r->model).n) != NULL) {
            /* an escaped slash: a server that decodes first reads another, shorter name */
            r->model_from = ROUTE_MODEL_BAD;
            r->model_error = BODYSCAN_E_MODEL_INVALID;
        }
    } else if (field != NULL) {
        model_is(r, http_value(h, field), false);
    } else if (h->body == HTTP_BODY_NONE || (h->body == HTTP_BODY_LENGTH && h->content_length == 0)) {
        if (required)
            r->model_from = ROUTE_MODEL_REQUIRED; /* an empty body: it will be found missing */
        else if (h->websocket)
            model_in_query(r, query_of(http_target(h)));
    } else if (!facts->impossible || facts->crooked) {
        r->model_from = required ? ROUTE_MODEL_REQUIRED : ROUTE_MODEL_OPTIONAL;
    }
}

/* --- the tenant ------------------------------------------------------------------------------------------- */

/* Where each API's SDK puts its key. */
static struct slice caller_key(const struct http_head *h, struct route *r)
{
    /* The API's own field first: whoever adds another one is still the same caller. */
    const enum http_field_id ids[] = {r->api == CONFIG_API_ANTHROPIC ? HTTP_FIELD_X_API_KEY
                                      : r->api == CONFIG_API_GEMINI  ? HTTP_FIELD_X_GOOG_API_KEY
                                                                     : HTTP_FIELD_AUTHORIZATION,
                                      HTTP_FIELD_AUTHORIZATION, HTTP_FIELD_API_KEY, HTTP_FIELD_X_API_KEY,
                                      HTTP_FIELD_X_GOOG_API_KEY}; /* Azure's before those it ignores */

    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        const struct http_field *f = http_find(h, ids[i]);
        struct slice v;

        if (f == NULL)
            continue;
        r->ambiguous |= http_count(h, ids[i]) > 1;
        v = http_value(h, f);
        if (v.n > 7 && slice_ieq((struct slice){v.p, 6}, SLICE("Bearer")) &&
            (v.p[6] == ' ' || v.p[6] == '\t'))
            v = slice_trim((struct slice){v.p + 7, v.n - 7});
        if (v.n == 0) /* no key at all: the next field may hold it */
            continue;
        return v;
    }
    return (struct slice){NULL, 0};
}

/* What the map makes of a value: false when it says nothing of it. */
static bool map_tenant(const struct config_tenant *t, struct slice value, struct slice *out)
{
    for (size_t i = 0; i < t->n_map; i++) {
        if (slice_eq(slice_of(t->map[i].from), value)) {
            *out = slice_of(t->map[i].to);
            return true;
        }
    }
    return false;
}

static void find_tenant(const struct config *c, const struct http_head *h, struct route *r)
{
    const struct config_tenant *t = &c->tenant;
    struct slice raw = {NULL, 0};

    if (t->from == CONFIG_TENANT_HEADER) {
        const struct http_field *f = only_field(h, t->header, r);

        if (f != NULL)
            raw = http_value(h, f);
    } else if (t->from == CONFIG_TENANT_KEY) {
        raw = caller_key(h, r);
    }
    r->tenant = raw;
    if (raw.n == 0 || map_tenant(t, raw, &r->tenant) || t->from != CONFIG_TENANT_KEY)
        return;
    /* a key is a secret: only its hash goes on from here, and the file may name it by its hash */
    memcpy(r->tenant_buf_, "key-", 4);
    hash_stable_hex(raw, r->tenant_buf_ + 4);
    r->tenant = (struct slice){r->tenant_buf_, 36};
    (void)map_tenant(t, r->tenant, &r->tenant);
}

/* --- the route --------------------------------------------------------------------------------------------- */

static enum config_api api_of(const struct path_facts *f, enum config_api fallback)
{
    return f->anthropic ? CONFIG_API_ANTHROPIC
           : f->gemini  ? CONFIG_API_GEMINI
           : f->openai  ? CONFIG_API_OPENAI
                        : fallback;
}

static bool limit_asks_for_model(const struct config_limit *l)
{
    return l->n_models > 0 || l->per_model;
}

static bool one_of(char *const *names, size_t n, struct slice value, bool glob)
{
    for (size_t i = 0; i < n; i++) {
        struct slice name = slice_of(names[i]);

        if (glob ? str_glob(name, value) : slice_eq(name, value))
            return true;
    }
    return false;
}

/* What can be said of a limit without knowing the model. */
static bool limit_may_count(const struct config_limit *l, const struct route *r)
{
    if (l->n_upstreams > 0 && !one_of(l->upstreams, l->n_upstreams, slice_of(r->upstream->name), false))
        return false;
    return l->n_tenants == 0 || one_of(l->tenants, l->n_tenants, r->tenant, true);
}

bool route_find(const struct config *c, const struct http_head *h, struct route *out)
{
    struct slice target = http_target(h);
    struct path_facts facts = read_path(path_of(target), h->method == HTTP_POST);

    memset(out, 0, offsetof(struct route, model));
    model_name_init(&out->model);
    out->tenant = (struct slice){NULL, 0};
    out->api = api_of(&facts, CONFIG_API_OPENAI);
    for (size_t i = 0; i < c->n_routes; i++) {
        if (!slice_starts_with(target, slice_of(c->routes[i].prefix)))
            continue;
        out->upstream = c->routes[i].upstream;
        break;
    }
    if (out->upstream == NULL)
        return false;
    out->api = api_of(&facts, out->upstream->api);
    find_tenant(c, h, out);
    find_model(c, h, &facts, out);
    if (out->model_from != ROUTE_MODEL_REQUIRED && out->model_from != ROUTE_MODEL_OPTIONAL)
        return true;
    for (size_t i = 0; i < c->n_limits && !out->scan; i++)
        out->scan = limit_asks_for_model(&c->limits[i]) && limit_may_count(&c->limits[i], out);
    return true;
}

/* --- scopes ------------------------------------------------------------------------------------------------ */

static uint32_t cap_of(const struct config_limit *l, struct slice value)
{
    for (size_t i = 0; i < l->n_overrides; i++)
        if (slice_eq(slice_of(l->overrides[i].value), value))
            return l->overrides[i].concurrency;
    return l->concurrency;
}

static bool fill_scope(struct lease_scope *s, const struct config_limit *l, const struct route *r,
                       struct slice model)
{
    s->limit = l;
    s->cap = l->concurrency;
    s->name_n = strlen(l->name);
    memcpy(s->name, l->name, s->name_n);
    if (l->n_overrides > 0)
        s->cap = cap_of(l, l->per_model ? model : r->tenant);
    if (l->per_model && !lease_scope_add(s, model))
        return false;
    return !l->per_tenant || lease_scope_add(s, r->tenant);
}

/* In small letters: an API that heeds no case would let `GPT-4o` pass by the limit of `gpt-4o`. */
static struct slice fold_case(struct slice s, char out[MODEL_NAME_MAX])
{
    for (size_t i = 0; i < s.n; i++)
        out[i] = ascii_lower(s.p[i]);
    return (struct slice){out, s.n};
}

int route_scopes(const struct config *c, const struct route *r, struct lease_scope out[LEASE_SCOPES_MAX])
{
    char folded[MODEL_NAME_MAX];
    struct slice model = fold_case(model_name_slice(&r->model), folded);
    int n = 0;

    for (size_t i = 0; i < c->n_limits; i++) {
        const struct config_limit *l = &c->limits[i];

        if (!limit_may_count(l, r) || (limit_asks_for_model(l) && model.n == 0))
            continue;
        if (l->n_models > 0 && !one_of(l->models, l->n_models, model, true))
            continue;
        if (n == LEASE_SCOPES_MAX || !fill_scope(&out[n], l, r, model))
            return -1;
        n++;
    }
    return n;
}

/* --- for the log ---------------------------------------------------------------------------------------------- */

/* Parameters that never carry a secret; the value of any other is hidden. */
static bool is_harmless(struct slice key)
{
    static const char *const names[] = {"model",   "alt",      "api-version", "stream", "limit",
                                        "after",   "before",   "order",       "beta",   "purpose",
                                        "include", "pageSize", "pageToken"};

    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (slice_eq(key, slice_of(names[i])))
            return true;
    return false;
}

static void put(struct slice s, char *out, size_t n, size_t *used)
{
    size_t part = size_min(s.n, n - *used);

    if (part > 0)
        memcpy(out + *used, s.p, part);
    *used += part;
}

struct slice route_loggable_target(struct slice target, char *out, size_t n)
{
    struct slice query = query_of(target), path = path_of(target);
    size_t used = 0;
    const char *joint = "?";

    put(path, out, n, &used);
    while (query.n > 0) {
        size_t end = slice_find(query, '&');
        struct slice pair = {query.p, end};
        size_t equals = slice_find(pair, '=');

        put(slice_of(joint), out, n, &used);
        joint = "&";
        if (equals == pair.n || is_harmless((struct slice){pair.p, equals})) {
            put(pair, out, n, &used);
        } else {
            put((struct slice){pair.p, equals}, out, n, &used);
            put(SLICE("=***"), out, n, &used);
        }
        query.p += end == query.n ? end : end + 1;
        query.n -= end == query.n ? end : end + 1;
    }
    return (struct slice){out, used};
}
