/*
 * scanbench.c - how fast the scans for the model go over bodies of several kinds.
 *
 *   scanbench [MEBIBYTES] [FEED_KIB]     default 64 MiB bodies, fed by 64 KiB
 *
 * The kinds: what chat clients send (long texts in messages), base64 images,
 * text where every few bytes is an escape, tool schemas that are all structure,
 * and one long string at the top level. Each body has `model` at its very end,
 * so the whole of it is scanned; the best of five runs is printed, in GB/s (10^9).
 *
 * Then forms whose file comes first, and compressed bodies, in GB/s of decoded bytes.
 * SSE2 against the word-wise fallback, for JSON: build with and without -DSCANBENCH_WORDS.
 */
#ifdef SCANBENCH_WORDS
#undef __SSE2__
#endif
#include "../proxy/scan.c"

#include "../proxy/bodyscan.h"
#include "../proxy/mem.h"

#include <stdio.h>
#include <time.h>
#include <zlib.h>
#include <zstd.h>

struct kind {
    const char *name;
    const char *open;
    const char *unit; /* repeated */
    const char *close;
};

static const struct kind kinds[] = {
    {"messages, plain text", "{\"messages\":[{\"role\":\"user\",\"content\":\"",
     "The quick brown fox jumps over the lazy dog while the committee reads the minutes of the last "
     "meeting. ",
     "\"}],\"model\":\"gpt-4o\"}"},
    {"messages, UTF-8 text", "{\"messages\":[{\"role\":\"user\",\"content\":\"",
     "\xd0\x91\xd1\x8b\xd1\x81\xd1\x82\xd1\x80\xd0\xb0\xd1\x8f \xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e ",
     "\"}],\"model\":\"gpt-4o\"}"},
    {"messages, a line break every 60 bytes", "{\"messages\":[{\"role\":\"user\",\"content\":\"",
     "    for (size_t i = 0; i < n; i++) total += weights[i] * x[i];\\n", "\"}],\"model\":\"gpt-4o\"}"},
    {"base64 image",
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"image_url\":{\"url\":\"data:image/png;base64,",
     "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk/M9QDwADhgGA",
     "\"}}]}],\"model\":\"gpt-4o\"}"},
    {"escapes: \\n every 4 bytes", "{\"messages\":[{\"content\":\"", "ab\\n", "\"}],\"model\":\"gpt-4o\"}"},
    {"escapes: \\\" every 5 bytes", "{\"messages\":[{\"content\":\"", "abc\\\"",
     "\"}],\"model\":\"gpt-4o\"}"},
    {"escapes: \\\\ only", "{\"messages\":[{\"content\":\"", "\\\\", "\"}],\"model\":\"gpt-4o\"}"},
    {"escapes: \\uXXXX only", "{\"messages\":[{\"content\":\"", "\\u65e5", "\"}],\"model\":\"gpt-4o\"}"},
    {"top-level string, plain text", "{\"input\":\"",
     "Summarise the following report in three sentences of plain English. ", "\",\"model\":\"gpt-4o\"}"},
    {"top-level string, \\n every 4 bytes", "{\"input\":\"", "ab\\n", "\",\"model\":\"gpt-4o\"}"},
    {"many short messages", "{\"messages\":[{\"role\":\"system\",\"content\":\"x\"}",
     ",{\"role\":\"user\",\"content\":\"What is the capital of France, and since when?\"}",
     "],\"model\":\"gpt-4o\"}"},
    {"tool schemas", "{\"tools\":[{}",
     ",{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
     "\"properties\":{\"a\":{"
     "\"type\":\"string\"},\"b\":{\"type\":\"integer\"}},\"required\":[\"a\"]}}}",
     "],\"model\":\"gpt-4o\"}"},
    {"numbers (embeddings)", "{\"input\":[0", ",-0.0123456", "],\"model\":\"gpt-4o\"}"},
    {"brackets only", "{\"input\":[0", ",[[[[]]]]", "],\"model\":\"gpt-4o\"}"},
    {"top level only: short keys", "{\"a\":0", ",\"k\":true", ",\"model\":\"gpt-4o\"}"},
};

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static size_t build(char *out, size_t size, const struct kind *k)
{
    size_t open = strlen(k->open), unit = strlen(k->unit), close = strlen(k->close), n = open;

    memcpy(out, k->open, open);
    for (; n + unit + close <= size; n += unit)
        memcpy(out + n, k->unit, unit);
    memcpy(out + n, k->close, close);
    return n + close;
}

static double run(const char *body, size_t n, size_t feed)
{
    struct scan s;
    double begin = seconds(), end;

    scan_init(&s, SCAN_JSON);
    for (size_t at = 0; at < n; at += feed)
        (void)scan_feed(&s, body + at, size_min(feed, n - at));
    BUG_ON(scan_end(&s) != BODYSCAN_FOUND || !slice_eq(scan_model(&s), SLICE("gpt-4o")));
    end = seconds();
    return (double)n / (end - begin) / 1e9;
}

static double run_body(const char *type, const char *coding, struct slice body, size_t feed,
                       size_t decoded_bytes)
{
    enum bodyscan_error why;
    double begin = seconds(), end;
    struct bodyscan *b = bodyscan_new(slice_of(type), slice_of(coding), decoded_bytes, &why);

    BUG_ON(b == NULL);
    for (size_t at = 0; at < body.n; at += feed)
        (void)bodyscan_feed(b, body.p + at, size_min(feed, body.n - at));
    BUG_ON(bodyscan_end(b) != BODYSCAN_FOUND);
    bodyscan_free(b);
    end = seconds();
    return (double)decoded_bytes / (end - begin) / 1e9;
}

static void report(const char *name, const char *type, const char *coding, struct slice body, size_t feed,
                   size_t decoded_bytes)
{
    double best = 0;

    for (int round = 0; round < 5; round++) {
        double rate = run_body(type, coding, body, feed, decoded_bytes);

        best = rate > best ? rate : best;
    }
    printf("%-40s %7.2f GB/s\n", name, best);
    fflush(stdout);
}

/* out: random bytes, or lines of text, as the file of a form. */
static struct slice build_form(char *out, size_t size, bool text)
{
    static const char head[] = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
    static const char tail[] =
        "\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--b--\r\n";
    size_t n = sizeof(head) - 1;
    uint64_t seed = 88172645463325252ULL;

    memcpy(out, head, n);
    for (; n + sizeof(tail) < size; n++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        out[n] = text ? (seed % 60 == 0 ? '\n' : (char)('a' + seed % 26)) : (char)(seed >> 32);
    }
    memcpy(out + n, tail, sizeof(tail) - 1);
    return (struct slice){out, n + sizeof(tail) - 1};
}

/* A chat body of words drawn at random, which compresses about as text does. */
static size_t build_words(char *out, size_t size)
{
    static const char *const words[] = {"the ", "model ",    "answers ", "every ", "question ",
                                        "of ",  "a ",        "user\\n",  "with ",  "\\\"care\\\" ",
                                        "and ", "patience ", "in ",      "42 ",    "words "};
    size_t n = build(out, 64, &(struct kind){"", "{\"messages\":[{\"content\":\"", "x", ""});
    uint32_t seed = 1;

    while (n + 64 < size) {
        const char *word;

        seed = seed * 1664525 + 1013904223;
        word = words[(seed >> 20) % ARRAY_LEN(words)];
        memcpy(out + n, word, strlen(word));
        n += strlen(word);
    }
    memcpy(out + n, "\"}],\"model\":\"gpt-4o\"}", 21);
    return n + 21;
}

static void bench_forms(char *body, size_t size, size_t feed)
{
    const char *type = "multipart/form-data; boundary=b";
    struct slice form = build_form(body, size, false);

    report("form, random bytes", type, "", form, feed, form.n);
    form = build_form(body, size, true);
    report("form, lines of 60 letters", type, "", form, feed, form.n);
}

static void bench_codings(char *body, size_t size, size_t feed)
{
    size_t n = build_words(body, size_min(size, 32U << 20)),
           room = compressBound((uLong)n) + ZSTD_compressBound(n);
    char *packed = mem_must_zalloc(room);
    uLongf packed_n = (uLongf)room;

    BUG_ON(compress2((Bytef *)packed, &packed_n, (const Bytef *)body, (uLong)n, 6) != Z_OK);
    report("deflate, chat text", "application/json", "deflate", (struct slice){packed, packed_n}, feed, n);
    packed_n = ZSTD_compress(packed, room, body, n, 3);
    report("zstd, chat text", "application/json", "zstd", (struct slice){packed, packed_n}, feed, n);
    mem_free(packed);
}

int main(int argc, char **argv)
{
    uint64_t mebibytes = 64, feed_kib = 64;
    char *body;

    if (argc > 1 && (!str_parse_u64(slice_of(argv[1]), &mebibytes) || mebibytes == 0 || mebibytes > 4096))
        return fprintf(stderr, "scanbench [MEBIBYTES] [FEED_KIB]\n"), 2;
    if (argc > 2 && (!str_parse_u64(slice_of(argv[2]), &feed_kib) || feed_kib == 0 || feed_kib > 1048576))
        return fprintf(stderr, "scanbench [MEBIBYTES] [FEED_KIB]\n"), 2;
    body = mem_must_zalloc((size_t)mebibytes << 20);
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        size_t n = build(body, (size_t)mebibytes << 20, &kinds[i]);
        double best = 0;

        for (int round = 0; round < 5; round++) {
            double rate = run(body, n, (size_t)feed_kib << 10);

            best = rate > best ? rate : best;
        }
        printf("%-40s %7.2f GB/s\n", kinds[i].name, best);
        fflush(stdout);
    }
    bench_forms(body, (size_t)mebibytes << 20, (size_t)feed_kib << 10);
    bench_codings(body, (size_t)mebibytes << 20, (size_t)feed_kib << 10);
    mem_free(body);
    return 0;
}
