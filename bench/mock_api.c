/*
 * mock_api.c - what the APIs look like: routes, JSON answers, event streams and errors.
 *
 * Written against the official SDKs (openai, @anthropic-ai/sdk, @google/genai), which must take every
 * answer without complaint. Each event carries `mock_sent_ns`, CLOCK_MONOTONIC when it was made: a reader
 * on the same machine computes the one-way lag from it. SDKs ignore the extra member.
 */
#include "mock.h"

#include <time.h>

enum { DEFAULT_JSON_BYTES = 1024, DEFAULT_EVENT_BYTES = 16, TEXT_REPEAT_MAX = 32 * 1024 };

static struct slice path_of(struct slice target)
{
    const char *query = memchr(target.p, '?', target.n);

    return query == NULL ? target : (struct slice){target.p, (size_t)(query - target.p)};
}

/* The path segment after `before` becomes the model, up to any of `stops`. */
static void model_from_path(struct call *c, struct slice path, const char *before, const char *stops)
{
    const char *at = memmem(path.p, path.n, before, strlen(before));
    size_t n = 0;

    if (at == NULL)
        return;
    at += strlen(before);
    while (at + n < path.p + path.n && strchr(stops, at[n]) == NULL && n < sizeof(c->scan.model) - 1) {
        if (at[n] == '"' || at[n] == '\\' || (unsigned char)at[n] < 0x20)
            return;
        n++;
    }
    memcpy(c->scan.model, at, n);
    c->scan.model[n] = '\0';
}

void api_route(struct call *c, struct slice method, struct slice target)
{
    static const struct {
        struct slice end;
        enum api api;
    } routes[] = {
        {{"/chat/completions", 17}, API_CHAT},
        {{"/responses", 10}, API_RESPONSES},
        {{"/v1/messages", 12}, API_MESSAGES},
        {{":generateContent", 16}, API_GEMINI},
        {{":streamGenerateContent", 22}, API_GEMINI_STREAM},
        {{"/embeddings", 11}, API_EMBEDDINGS},
        {{"/completions", 12}, API_COMPLETION},
        {{"/messages/count_tokens", 22}, API_COUNT_TOKENS},
        {{":countTokens", 12}, API_GEMINI_COUNT},
        {{"/audio/transcriptions", 21}, API_TRANSCRIPTION},
        {{"/audio/translations", 19}, API_TRANSCRIPTION},
    };
    struct slice path = path_of(target);
    bool is_post = slice_eq(method, SLICE("POST"));
    bool is_get = slice_eq(method, SLICE("GET"));

    c->is_head = slice_eq(method, SLICE("HEAD"));
    c->api = API_ECHO;
    if (c->wish.echo)
        return;
    if (is_post) {
        for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
            if (slice_ends_with(path, routes[i].end)) {
                c->api = routes[i].api;
                break;
            }
        }
        if (slice_eq(path, SLICE("/reset")))
            c->api = API_RESET;
    } else if (is_get && slice_eq(path, SLICE("/stats"))) {
        c->api = API_STATS;
    } else if (is_get || c->is_head) {
        if (slice_ends_with(path, SLICE("/models")))
            c->api = API_MODELS;
        else if (path.n > 11 && memcmp(path.p, "/v1/models/", 11) == 0)
            c->api = API_MODEL;
    }
    if (c->api == API_GEMINI || c->api == API_GEMINI_STREAM || c->api == API_GEMINI_COUNT ||
        c->api == API_MODEL)
        model_from_path(c, path, "/models/", ":/");
    else if (c->api == API_CHAT || c->api == API_COMPLETION || c->api == API_EMBEDDINGS)
        model_from_path(c, path, "/openai/deployments/", "/");
    if (c->api == API_GEMINI_STREAM)
        c->sse = memmem(target.p, target.n, "alt=sse", 7) != NULL;
}

bool api_can_stream(enum api api)
{
    return api == API_CHAT || api == API_COMPLETION || api == API_RESPONSES || api == API_MESSAGES ||
           api == API_GEMINI_STREAM;
}

const char *api_stream_type(const struct call *c)
{
    return c->api == API_GEMINI_STREAM && !c->sse ? "application/json; charset=UTF-8"
                                                  : "text/event-stream; charset=utf-8";
}

static const char *model_of(const struct call *c)
{
    return c->scan.model[0] != '\0' ? c->scan.model : "mock";
}

static uint64_t event_bytes(const struct call *c)
{
    return c->wish.bytes == UINT64_MAX ? DEFAULT_EVENT_BYTES : size_min((size_t)c->wish.bytes, 128 * 1024);
}

static void put_id(struct text *t, const char *prefix, const struct call *c)
{
    text_str(t, prefix);
    text_lit(t, "mock");
    text_u64(t, c->id);
}

static void put_model(struct text *t, const struct call *c)
{
    text_lit(t, "\"model\":\"");
    text_str(t, model_of(c));
    text_lit(t, "\"");
}

static void put_created(struct text *t)
{
    text_u64(t, (uint64_t)time(NULL));
}

/* Tokens are bytes divided by four, as good a guess as any. */
static void put_tokens(struct text *t, const struct call *c, const char *in_name, const char *out_name,
                       const char *sum_name)
{
    uint64_t in = c->body.total / 4 + 1;
    uint64_t out = c->streams ? c->wish.events : 64;

    text_lit(t, "\"");
    text_str(t, in_name);
    text_lit(t, "\":");
    text_u64(t, in);
    text_lit(t, ",\"");
    text_str(t, out_name);
    text_lit(t, "\":");
    text_u64(t, out);
    if (sum_name != NULL) {
        text_lit(t, ",\"");
        text_str(t, sum_name);
        text_lit(t, "\":");
        text_u64(t, in + out);
    }
}

static void put_openai_usage(struct text *t, const struct call *c)
{
    text_lit(t, "{");
    put_tokens(t, c, "prompt_tokens", "completion_tokens", "total_tokens");
    text_lit(t, "}");
}

static void put_responses_usage(struct text *t, const struct call *c)
{
    text_lit(t, "{\"input_tokens_details\":{\"cached_tokens\":0},\"output_tokens_details\":{\"reasoning_"
                "tokens\":0},");
    put_tokens(t, c, "input_tokens", "output_tokens", "total_tokens");
    text_lit(t, "}");
}

static void put_gemini_usage(struct text *t, const struct call *c)
{
    text_lit(t, "\"usageMetadata\":{");
    put_tokens(t, c, "promptTokenCount", "candidatesTokenCount", "totalTokenCount");
    text_lit(t, "},\"modelVersion\":\"");
    text_str(t, model_of(c));
    put_id(t, "\",\"responseId\":\"", c);
    text_lit(t, "\"");
}

/* The response object of the Responses API, up to its output list. */
static void put_response_object(struct text *t, const struct call *c, const char *status)
{
    put_id(t, "{\"id\":\"resp_", c);
    text_lit(t, "\",\"object\":\"response\",\"created_at\":");
    put_created(t);
    text_lit(t, ",\"status\":\"");
    text_str(t, status);
    text_lit(
        t,
        "\",\"error\":null,\"incomplete_details\":null,\"instructions\":null,\"metadata\":{},"
        "\"parallel_tool_calls\":true,\"temperature\":1,\"tool_choice\":\"auto\",\"tools\":[],\"top_p\":1,");
    put_model(t, c);
    text_lit(t, ",\"output\":[");
}

static void put_message_item(struct text *t, const struct call *c, const char *status)
{
    put_id(t, "{\"id\":\"msg_", c);
    text_lit(t, "\",\"type\":\"message\",\"role\":\"assistant\",\"status\":\"");
    text_str(t, status);
    text_lit(t, "\",\"content\":[");
}

/* ---- JSON ---- */

static void json_models(const struct call *c, struct text *t)
{
    static const char *const names[] = {"gpt-4o", "gpt-4o-mini", "claude-mock", "gemini-2.5-flash", "mock"};

    if (c->api == API_MODEL) {
        text_fmt(t,
                 "{\"id\":\"%s\",\"object\":\"model\",\"type\":\"model\",\"created\":1700000000,"
                 "\"created_at\":\"2023-11-14T22:13:20Z\",\"display_name\":\"%s\",\"owned_by\":\"mock\"}",
                 model_of(c), model_of(c));
        return;
    }
    text_lit(
        t, "{\"object\":\"list\",\"has_more\":false,\"first_id\":\"gpt-4o\",\"last_id\":\"mock\",\"data\":[");
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        text_fmt(t,
                 "%s{\"id\":\"%s\",\"object\":\"model\",\"type\":\"model\",\"created\":1700000000,"
                 "\"created_at\":\"2023-11-14T22:13:20Z\",\"display_name\":\"%s\",\"owned_by\":\"mock\"}",
                 i == 0 ? "" : ",", names[i], names[i]);
    text_lit(t, "]}");
}

static void json_embeddings(const struct call *c, struct text *t)
{
    text_lit(t, "{\"object\":\"list\",\"data\":[{\"object\":\"embedding\",\"index\":0,\"embedding\":");
    /* Eight floats: 0.5 -0.5 0.25 -0.25 1 -1 0 2, as numbers or as base64 of little-endian float32. */
    if (c->scan.base64)
        text_lit(t, "\"AAAAPwAAAL8AAIA+AACAvgAAgD8AAIC/AAAAAAAAAEA=\"");
    else
        text_lit(t, "[0.5,-0.5,0.25,-0.25,1,-1,0,2]");
    text_lit(t, "}],");
    put_model(t, c);
    text_fmt(t, ",\"usage\":{\"prompt_tokens\":%llu,\"total_tokens\":%llu}}",
             (unsigned long long)(c->body.total / 4 + 1), (unsigned long long)(c->body.total / 4 + 1));
}

static void json_chat(const struct call *c, struct text *a, struct text *b)
{
    bool chat = c->api == API_CHAT;

    put_id(a, chat ? "{\"id\":\"chatcmpl-" : "{\"id\":\"cmpl-", c);
    text_str(a, chat ? "\",\"object\":\"chat.completion\",\"created\":"
                     : "\",\"object\":\"text_completion\",\"created\":");
    put_created(a);
    text_lit(a, ",");
    put_model(a, c);
    text_lit(a, ",\"choices\":[{\"index\":0,\"logprobs\":null,\"finish_reason\":\"stop\",");
    text_str(a, chat ? "\"message\":{\"role\":\"assistant\",\"refusal\":null,\"content\":\"" : "\"text\":\"");
    text_str(b, chat ? "\"}}],\"usage\":" : "\"}],\"usage\":");
    put_openai_usage(b, c);
    text_lit(b, "}");
}

static void json_responses(const struct call *c, struct text *a, struct text *b)
{
    put_response_object(a, c, "completed");
    put_message_item(a, c, "completed");
    text_lit(a, "{\"type\":\"output_text\",\"annotations\":[],\"text\":\"");
    text_lit(b, "\"}]}],\"usage\":");
    put_responses_usage(b, c);
    text_lit(b, "}");
}

static void json_messages(const struct call *c, struct text *a, struct text *b)
{
    put_id(a, "{\"id\":\"msg_", c);
    text_lit(a, "\",\"type\":\"message\",\"role\":\"assistant\",");
    put_model(a, c);
    text_lit(a, ",\"content\":[{\"type\":\"text\",\"text\":\"");
    text_lit(b, "\"}],\"stop_reason\":\"end_turn\",\"stop_sequence\":null,\"usage\":{");
    put_tokens(b, c, "input_tokens", "output_tokens", NULL);
    text_lit(b, "}}");
}

static void json_gemini(const struct call *c, struct text *a, struct text *b)
{
    text_lit(a, "{\"candidates\":[{\"index\":0,\"finishReason\":\"STOP\",\"content\":{\"role\":\"model\","
                "\"parts\":[{\"text\":\"");
    text_lit(b, "\"}]}}],");
    put_gemini_usage(b, c);
    text_lit(b, "}");
}

void api_json(const struct call *c, struct text *before, uint64_t *fill, struct text *after)
{
    uint64_t size = c->wish.bytes == UINT64_MAX ? DEFAULT_JSON_BYTES : c->wish.bytes;

    *fill = 0;
    switch (c->api) {
    case API_CHAT:
    case API_COMPLETION:
        json_chat(c, before, after);
        break;
    case API_RESPONSES:
        json_responses(c, before, after);
        break;
    case API_MESSAGES:
        json_messages(c, before, after);
        break;
    case API_GEMINI:
    case API_GEMINI_STREAM:
        json_gemini(c, before, after);
        break;
    case API_EMBEDDINGS:
        json_embeddings(c, before);
        return;
    case API_MODELS:
    case API_MODEL:
        json_models(c, before);
        return;
    case API_COUNT_TOKENS:
        text_fmt(before, "{\"input_tokens\":%llu}", (unsigned long long)(c->body.total / 4 + 1));
        return;
    case API_GEMINI_COUNT:
        text_fmt(before, "{\"totalTokens\":%llu}", (unsigned long long)(c->body.total / 4 + 1));
        return;
    case API_TRANSCRIPTION:
        text_lit(before,
                 "{\"text\":\"the quick brown fox\",\"usage\":{\"type\":\"duration\",\"seconds\":2}}");
        return;
    case API_ECHO:
    case API_STATS:
    case API_RESET:
        return; /* made in mock_call.c: they are about the call and the counters */
    }
    if (size > before->n + after->n)
        *fill = size - before->n - after->n;
}

/* ---- errors ---- */

static const char *pick_error(uint32_t status, bool anthropic)
{
    static const struct {
        uint32_t status;
        const char *anthropic, *gemini;
    } names[] = {
        {400, "invalid_request_error", "INVALID_ARGUMENT"}, {401, "authentication_error", "UNAUTHENTICATED"},
        {403, "permission_error", "PERMISSION_DENIED"},     {404, "not_found_error", "NOT_FOUND"},
        {413, "request_too_large", "INVALID_ARGUMENT"},     {429, "rate_limit_error", "RESOURCE_EXHAUSTED"},
        {503, "overloaded_error", "UNAVAILABLE"},           {504, "timeout_error", "DEADLINE_EXCEEDED"},
        {529, "overloaded_error", "UNAVAILABLE"},
    };

    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (names[i].status == status)
            return anthropic ? names[i].anthropic : names[i].gemini;
    }
    return anthropic ? "api_error" : "INTERNAL";
}

void api_error(const struct call *c, uint32_t status, struct text *t)
{
    const char *why = status == 429 ? "mock-llm: rate limit reached" : "mock-llm: an error as asked for";

    switch (c->api) {
    case API_MESSAGES:
    case API_COUNT_TOKENS:
        text_fmt(t,
                 "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":\"%s\"},\"request_id\":\"req_"
                 "mock%llu\"}",
                 pick_error(status, true), why, (unsigned long long)c->id);
        return;
    case API_GEMINI:
    case API_GEMINI_STREAM:
    case API_GEMINI_COUNT:
        text_fmt(t, "{\"error\":{\"code\":%u,\"message\":\"%s\",\"status\":\"%s\"}}", status, why,
                 pick_error(status, false));
        return;
    default:
        text_fmt(t, "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":%s}}", why,
                 status == 429   ? "requests"
                 : status >= 500 ? "server_error"
                                 : "invalid_request_error",
                 status == 429 ? "\"rate_limit_exceeded\"" : "null");
    }
}

/* ---- streams ---- */

static void put_sent(struct text *t)
{
    text_lit(t, "\"mock_sent_ns\":");
    text_u64(t, clock_ns());
}

/* `event: NAME`, and the object up to and with its comma, as Anthropic and the Responses API begin events. */
static void named_event(struct text *t, const char *name)
{
    text_lit(t, "event: ");
    text_str(t, name);
    text_lit(t, "\ndata: {\"type\":\"");
    text_str(t, name);
    text_lit(t, "\",");
}

static void responses_event(struct call *c, struct text *t, const char *name)
{
    named_event(t, name);
    text_lit(t, "\"sequence_number\":");
    text_u64(t, c->response_seq++);
    text_lit(t, ",");
}

static void put_item_place(struct text *t, const struct call *c)
{
    put_id(t, "\"item_id\":\"msg_", c);
    text_lit(t, "\",\"output_index\":0,\"content_index\":0");
}

/* The whole text of a stream again, as the closing events of the Responses API carry it. */
static void put_whole_text(struct text *t, const struct call *c)
{
    uint64_t n = event_bytes(c);

    if (n * c->wish.events > TEXT_REPEAT_MAX)
        return;
    for (uint32_t i = 0; i < c->wish.events; i++)
        text_fill(t, n);
}

static void put_output_text(struct text *t, const struct call *c)
{
    text_lit(t, "{\"type\":\"output_text\",\"annotations\":[],\"text\":\"");
    put_whole_text(t, c);
    text_lit(t, "\"}");
}

static void openai_chunk(struct call *c, struct text *t)
{
    bool chat = c->api == API_CHAT;

    put_id(t, chat ? "data: {\"id\":\"chatcmpl-" : "data: {\"id\":\"cmpl-", c);
    text_str(t, chat ? "\",\"object\":\"chat.completion.chunk\",\"created\":"
                     : "\",\"object\":\"text_completion\",\"created\":");
    put_created(t);
    text_lit(t, ",");
    put_model(t, c);
    text_lit(t, ",\"choices\":[");
}

void api_open(struct call *c, struct text *t)
{
    switch (c->api) {
    case API_CHAT:
        openai_chunk(c, t);
        text_lit(t, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\",\"refusal\":null},"
                    "\"logprobs\":null,\"finish_reason\":null}]}\n\n");
        break;
    case API_RESPONSES:
        responses_event(c, t, "response.created");
        text_lit(t, "\"response\":");
        put_response_object(t, c, "in_progress");
        text_lit(t, "],\"usage\":null}}\n\n");
        responses_event(c, t, "response.in_progress");
        text_lit(t, "\"response\":");
        put_response_object(t, c, "in_progress");
        text_lit(t, "],\"usage\":null}}\n\n");
        responses_event(c, t, "response.output_item.added");
        text_lit(t, "\"output_index\":0,\"item\":");
        put_message_item(t, c, "in_progress");
        text_lit(t, "]}}\n\n");
        responses_event(c, t, "response.content_part.added");
        put_item_place(t, c);
        text_lit(t, ",\"part\":{\"type\":\"output_text\",\"annotations\":[],\"text\":\"\"}}\n\n");
        break;
    case API_MESSAGES:
        named_event(t, "message_start");
        put_id(t, "\"message\":{\"id\":\"msg_", c);
        text_lit(t, "\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"stop_reason\":null,"
                    "\"stop_sequence\":null,");
        put_model(t, c);
        text_fmt(t, ",\"usage\":{\"input_tokens\":%llu,\"output_tokens\":1}}}\n\n",
                 (unsigned long long)(c->body.total / 4 + 1));
        named_event(t, "content_block_start");
        text_lit(t, "\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n");
        text_lit(t, "event: ping\ndata: {\"type\":\"ping\"}\n\n");
        break;
    case API_GEMINI_STREAM:
        if (!c->sse)
            text_lit(t, "[");
        break;
    default:
        break;
    }
}

void api_event(struct call *c, struct text *t)
{
    uint64_t n = event_bytes(c);

    switch (c->api) {
    case API_CHAT:
    case API_COMPLETION:
        openai_chunk(c, t);
        text_str(t,
                 c->api == API_CHAT ? "{\"index\":0,\"delta\":{\"content\":\"" : "{\"index\":0,\"text\":\"");
        text_fill(t, n);
        text_str(t, c->api == API_CHAT ? "\"},\"logprobs\":null,\"finish_reason\":null}],"
                                       : "\",\"logprobs\":null,\"finish_reason\":null}],");
        put_sent(t);
        text_lit(t, "}\n\n");
        break;
    case API_RESPONSES:
        responses_event(c, t, "response.output_text.delta");
        put_item_place(t, c);
        text_lit(t, ",\"logprobs\":[],\"delta\":\"");
        text_fill(t, n);
        text_lit(t, "\",");
        put_sent(t);
        text_lit(t, "}\n\n");
        break;
    case API_MESSAGES:
        named_event(t, "content_block_delta");
        text_lit(t, "\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"");
        text_fill(t, n);
        text_lit(t, "\"},");
        put_sent(t);
        text_lit(t, "}\n\n");
        break;
    case API_GEMINI_STREAM:
        text_str(t, c->sse ? "data: " : c->event > 0 ? ",\r\n" : "");
        text_lit(t, "{\"candidates\":[{\"index\":0,\"content\":{\"role\":\"model\",\"parts\":[{\"text\":\"");
        text_fill(t, n);
        text_lit(t, "\"}]}}],");
        put_gemini_usage(t, c);
        text_lit(t, ",");
        put_sent(t);
        text_str(t, c->sse ? "}\r\n\r\n" : "}");
        break;
    default:
        break;
    }
}

static void responses_close(struct call *c, struct text *t)
{
    responses_event(c, t, "response.output_text.done");
    put_item_place(t, c);
    text_lit(t, ",\"logprobs\":[],\"text\":\"");
    put_whole_text(t, c);
    text_lit(t, "\"}\n\n");
    responses_event(c, t, "response.content_part.done");
    put_item_place(t, c);
    text_lit(t, ",\"part\":");
    put_output_text(t, c);
    text_lit(t, "}\n\n");
    responses_event(c, t, "response.output_item.done");
    text_lit(t, "\"output_index\":0,\"item\":");
    put_message_item(t, c, "completed");
    put_output_text(t, c);
    text_lit(t, "]}}\n\n");
    responses_event(c, t, "response.completed");
    text_lit(t, "\"response\":");
    put_response_object(t, c, "completed");
    put_message_item(t, c, "completed");
    put_output_text(t, c);
    text_lit(t, "]}],\"usage\":");
    put_responses_usage(t, c);
    text_lit(t, "}}\n\n");
}

void api_close(struct call *c, struct text *t)
{
    switch (c->api) {
    case API_CHAT:
    case API_COMPLETION:
        openai_chunk(c, t);
        text_str(t, c->api == API_CHAT
                        ? "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n"
                        : "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n");
        if (c->scan.include_usage) {
            openai_chunk(c, t);
            text_lit(t, "],\"usage\":");
            put_openai_usage(t, c);
            text_lit(t, "}\n\n");
        }
        text_lit(t, "data: [DONE]\n\n");
        break;
    case API_RESPONSES:
        responses_close(c, t);
        break;
    case API_MESSAGES:
        named_event(t, "content_block_stop");
        text_lit(t, "\"index\":0}\n\n");
        named_event(t, "message_delta");
        text_fmt(t,
                 "\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":{\"output_"
                 "tokens\":%u}}\n\n",
                 c->wish.events);
        text_lit(t, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
        break;
    case API_GEMINI_STREAM:
        text_str(t, c->sse ? "data: " : c->event > 0 ? ",\r\n" : "");
        text_lit(t, "{\"candidates\":[{\"index\":0,\"finishReason\":\"STOP\",\"content\":{\"role\":\"model\","
                    "\"parts\":[{\"text\":\"\"}]}}],");
        put_gemini_usage(t, c);
        text_str(t, c->sse ? "}\r\n\r\n" : "}]");
        break;
    default:
        break;
    }
}
