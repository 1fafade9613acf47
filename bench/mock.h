/*
 * mock.h - the words that the files of mock-llm share.
 *
 * mock-llm is an LLM API that never tires: it answers in the shapes of OpenAI, Anthropic and Gemini, it
 * misbehaves exactly as a request asks it to (x-mock-* fields), and it counts the calls in flight. That
 * count is what the tests hold against the configured limit, so it is kept by three rules:
 *
 *   1. a call counts from the moment its head is complete;
 *   2. it stops counting just before the write() that hands its last byte to the kernel, so whoever has
 *      seen the end of a response finds the count already down;
 *   3. before a new maximum is believed, every close that the kernel already knows of is counted first
 *      (loop_settle): a call that ended before another began is never counted beside it.
 *
 * Rule 3 sees the connections of its own thread only. Hold a limit against one thread (the default).
 *
 * One epoll loop a thread, edge-triggered, each descriptor registered once. A connection that waits owns
 * its struct and nothing else: buffers exist only while there are bytes in them.
 *
 *   mock-llm.c    options, listeners, threads        mock_loop.c   epoll, timers, the order of a turn
 *   mock_conn.c   bytes in and out, plain or TLS     mock_http.c   request heads, bodies, what they ask for
 *   mock_call.c   the life of a call                 mock_answer.c its answer, in bytes
 *   mock_stats.c  the counters                       mock_api.c    the shapes of the APIs
 *   mock_fault.c  the table of misbehaviours         mock_ws.c     WebSocket echo
 *   mock_text.c   a bounded text builder             mock_gzip.c   gzip without compression
 */
#ifndef MOCK_H
#define MOCK_H

#include "../proxy/base.h"
#include "../proxy/str.h"
#include "chunked.h"
#include "timers.h"

#include <openssl/ssl.h>
#include <stdatomic.h>

enum {
    MOCK_HEAD_MAX = 128 * 1024,     /* longest request head */
    MOCK_READ_SIZE = 256 * 1024,    /* one read() */
    MOCK_SCRATCH_SIZE = 256 * 1024, /* longest piece that is built at once */
    MOCK_OUT_HIGH = 256 * 1024,     /* queued bytes at which a stream waits for its reader */
    MOCK_MODEL_MAX = 64,
    MOCK_GROUPS = 64,
};

/* ---- mock_text.c: text in a buffer of somebody else; what does not fit is dropped and `full` is set ---- */

struct text {
    char *p;
    size_t n;
    size_t cap;
    bool full;
};

void text_put(struct text *t, const char *s, size_t n);
void text_str(struct text *t, const char *s);
void text_u64(struct text *t, uint64_t v);
/* The bytes of s as the inside of a JSON string; bytes above 0x7e and controls as \u00XX (Latin-1). */
void text_json(struct text *t, struct slice s);
/* n bytes of plain words, beginning anew each time; the same n gives the same bytes. */
void text_fill(struct text *t, uint64_t n);
void text_fmt(struct text *t, const char *fmt, ...) PRINTF_LIKE(2, 3);

#define text_lit(t, literal) text_put((t), (literal), sizeof(literal) - 1)

/* ---- mock_fault.c ---- */

/* What a fault does, beyond what the fields of struct fault say. */
enum fault_act {
    FAULT_NONE,
    FAULT_SILENT,      /* no answer, ever */
    FAULT_NO_READ,     /* no answer, and the body is not read either */
    FAULT_BEFORE_HEAD, /* ends where the head was due */
    FAULT_MID_HEAD,    /* ends after half a head */
    FAULT_MID_BODY,    /* ends after half the body, at an event boundary if there are events */
    FAULT_MID_EVENT,   /* ends in the middle of an event */
    FAULT_HOLD,        /* everything but the last chunk, or the last byte; the connection stays open */
    FAULT_EARLY,       /* answers before it has read the body */
    FAULT_INTERIM,     /* sends `raw` as soon as the head is there, then answers as usual */
    FAULT_RAW,         /* sends `raw` instead of a response */
    FAULT_FIELD,       /* adds `raw` to the head of the response */
    FAULT_NO_LENGTH,   /* body ended by close */
    FAULT_TRAILERS,    /* chunked, with trailers */
    FAULT_BAD_CHUNK,   /* `raw` in place of the second chunk */
    FAULT_EXTRA,       /* `raw` behind the end of the response */
    FAULT_IDLE,        /* sends `raw` before x-mock-idle-close-ms closes */
};

/* How a connection is ended by a fault that ends it. */
enum fault_end { FAULT_KEEP, FAULT_FIN, FAULT_RST, FAULT_STALL };

struct fault {
    const char *name;
    enum fault_act act;
    enum fault_end end;
    const char *raw;
    const char *help;
};

const struct fault *fault_find(struct slice name); /* NULL: no such fault */
void fault_list(void);                             /* prints the table */

/* ---- mock_http.c ---- */

/* What the x-mock-* fields of one request, or --default, ask for. */
struct wish {
    const struct fault *fault;
    uint64_t bytes;       /* of text per event, or of JSON; UINT64_MAX: not said */
    uint64_t fault_after; /* events, or bytes of JSON, before a mid-body fault; UINT64_MAX: half */
    uint64_t read_bps;    /* 0: as fast as it comes */
    uint32_t ttft_ms;
    uint32_t first_event_ms;
    uint32_t delay_ms;
    uint32_t events;
    uint32_t status; /* 0: 200 */
    uint32_t hold_ms;
    uint32_t idle_close_ms; /* 0: never */
    uint32_t fault_percent;
    bool keep_working; /* goes on working when its caller has gone */
    bool echo;
    bool stream;   /* streams, whatever the body says */
    bool gzip;     /* streams: content-encoding gzip */
    bool ws_hello; /* WebSocket: a first frame in the segment of the 101 */
    bool unknown_fault;
};

/* A request head. Slices point into the bytes that were parsed. */
struct head {
    struct slice raw; /* from the method to the blank line, both included */
    struct slice method;
    struct slice target;
    struct slice fields; /* the field lines, each with its CRLF */
    struct slice ws_key;
    struct slice ws_protocol;
    struct slice group;
    struct wish wish;
    uint64_t length;
    bool has_length;
    bool chunked;
    bool http10;
    bool close;
    bool keep_alive;
    bool expect_continue;
    bool upgrade;
};

struct body {
    uint64_t left; /* of a body with a length */
    uint64_t total;
    struct chunked chunked;
    bool is_chunked;
};

/* What is sought in a request body, in whatever pieces it comes. */
struct scan {
    char model[MOCK_MODEL_MAX];
    char carry[112];
    uint8_t carried;
    bool stream;
    bool include_usage;
    bool base64;
};

enum http_result { HTTP_MORE, HTTP_OK, HTTP_BAD };

void wish_init(struct wish *w);
/* Takes one x-mock-* field. False: no such field, or a bad value. */
bool wish_set(struct wish *w, struct slice name, struct slice value);
/* Parses the head at the start of buf. *h must hold the default wish. HTTP_OK: h->raw.n bytes are it. */
enum http_result head_parse(struct slice buf, struct head *h);
/* The next field line of *rest; false at the end. */
bool head_next_field(struct slice *rest, struct slice *name, struct slice *value);
void body_init(struct body *b, const struct head *h);
/*
 * Takes the next bytes of a body off *in; *piece gets the decoded ones, which may be none. HTTP_OK: the
 * body has ended, *in begins at the next request. HTTP_MORE: call again when *in is not empty.
 */
enum http_result body_next(struct body *b, struct slice *in, struct slice *piece);
void scan_piece(struct scan *s, struct slice piece);

/* ---- mock_loop.c ---- */

struct loop;

/* Which of its two timers a connection is called for. */
enum { TIMER_ANSWER, TIMER_READ };

struct listener {
    int fd;
    bool tls;
};

struct loop {
    int epoll_fd;
    struct list conns;
    struct list ready; /* connections with unhandled events */
    struct list dead;  /* closed in this turn, freed at its end */
    struct timers timers;
    uint64_t now_ns;
    struct conn *current; /* whose events are being handled */
    SSL_CTX *tls;
    struct listener listeners[2];
    char *read_buffer;
    char *scratch;
};

/* Aborts the process when it cannot. */
void loop_init(struct loop *l, SSL_CTX *tls);
void loop_free(struct loop *l);
void loop_listen(struct loop *l, const struct listener *listener);
/* Turns until *stop. */
void loop_run(struct loop *l, const atomic_int *stop);
/* Counts every close that the kernel knows of by now; other events are kept for later in the turn. */
void loop_settle(struct loop *l);
void loop_arm(struct loop *l, struct timer *t, uint64_t due_ns);
void loop_disarm(struct loop *l, struct timer *t);

/* ---- mock_api.c ---- */

enum api {
    API_CHAT,
    API_COMPLETION,
    API_RESPONSES,
    API_EMBEDDINGS,
    API_MODELS,
    API_MODEL,
    API_MESSAGES,
    API_COUNT_TOKENS,
    API_GEMINI,
    API_GEMINI_STREAM,
    API_GEMINI_COUNT,
    API_TRANSCRIPTION,
    API_ECHO,
    API_STATS, /* the two of the mock itself: never counted */
    API_RESET,
};

enum framing { FRAMING_LENGTH, FRAMING_CHUNKED, FRAMING_CLOSE };

struct echo;

/* A WebSocket frame on its way back. */
struct ws {
    uint64_t left; /* payload bytes still to come */
    uint32_t at;   /* place in the mask */
    unsigned char mask[4];
    bool in_frame;
    bool closing;
};

/* One request and its answer; lives inside its connection. */
struct call {
    struct wish wish;
    struct scan scan;
    struct body body;
    struct ws ws;
    enum fault_end end; /* what happens when all is written */
    struct echo *echo;  /* owned; NULL unless it is an echo */
    struct group *group;
    uint64_t id;
    uint32_t gzip_crc, gzip_bytes; /* of what has been compressed */
    uint32_t event;                /* the next one to be sent */
    uint32_t response_seq;
    enum api api;
    enum framing framing;
    bool counted;
    bool streams;
    bool is_head;
    bool http10;
    bool keep_alive;
    bool sse; /* Gemini: ?alt=sse */
    bool over_cap;
    bool opened;  /* the head of the response is out */
    bool aborted; /* its caller has gone, it works on */
};

/* Which API a target is of; fills what the target itself says (model, stream). */
void api_route(struct call *c, struct slice method, struct slice target);
bool api_can_stream(enum api api);
const char *api_stream_type(const struct call *c);
/* The JSON answer in two halves with `*fill` bytes of words between them. */
void api_json(const struct call *c, struct text *before, uint64_t *fill, struct text *after);
void api_error(const struct call *c, uint32_t status, struct text *t);
/* A stream is: api_open, api_event for each event, api_close; written behind each other. */
void api_open(struct call *c, struct text *t);
void api_event(struct call *c, struct text *t);
void api_close(struct call *c, struct text *t);

/* ---- mock_call.c ---- */

struct conn;

/* The wish of a request that asks for nothing: --default. */
void call_default_wish(struct wish *w);
/* Takes `x-mock-…: value` as if each request said so. */
MUST_CHECK bool call_set_default(struct slice name, struct slice value);
/* Head complete: counts the call and plans its answer. False: the connection was closed. */
MUST_CHECK bool call_begin(struct conn *c, const struct head *h);
void call_body(struct conn *c, struct slice piece);
/* The body has ended. False: the connection was closed. */
MUST_CHECK bool call_body_end(struct conn *c);
/* The time it waited for has come. May close the connection. */
void call_on_timer(struct conn *c);
/* All that was queued has been written. May close the connection. */
void call_on_drained(struct conn *c);
/* The caller has gone. True: the call works on without it. */
MUST_CHECK bool call_gone(struct conn *c);
bool call_has_fault(const struct call *call, enum fault_act act);
/* call_on_timer in so many ms. */
void call_arm_ms(struct conn *c, uint64_t ms);
/* Sends the last bytes of an answer. May close. */
void call_send_last(struct conn *c, const char *p, size_t n);
/* All bytes of the answer have been given to conn_send. May close. */
void call_sent_all(struct conn *c);

/* ---- mock_answer.c: each may close ---- */

void answer_json(struct conn *c, uint32_t status);
void answer_stream(struct conn *c, uint32_t status);
/* Sends the events that are due; t may already hold a head. */
void answer_events(struct conn *c, struct text *t);
/* An echo keeps the head of its request and hashes the body. */
struct echo *echo_new(const struct head *h);
void echo_take(struct echo *e, struct slice piece);
void echo_free(struct call *call);

/* ---- mock_stats.c ---- */

/* Counts a call that begins, and says in call->over_cap when there are too many. */
void stats_call_begin(struct conn *c);
/* Called by the writer around the write of a last byte; uncounting twice is harmless. */
void call_uncount(struct call *call);
void call_recount(struct call *call);
void stats_completed(void);
void stats_aborted(void);
void stats_after_abort(uint64_t events, uint64_t bytes);
void stats_conn_opened(void);
void stats_conn_closed(void);
void stats_bad_request(void);
void stats_cap(uint64_t cap); /* 0: none */
uint64_t stats_next_id(void);
struct group *stats_group(struct slice name); /* NULL: no name, or no room */
void stats_put(struct text *t);
void stats_reset(void);

/* ---- mock_conn.c ---- */

enum conn_in { IN_HEAD, IN_BODY, IN_DONE, IN_TUNNEL, IN_STOPPED };

enum conn_out {
    OUT_IDLE,   /* no call, or its answer is complete */
    OUT_BODY,   /* waits for the end of the body */
    OUT_DELAY,  /* waits for the time of its head */
    OUT_EVENTS, /* sends events */
    OUT_FLUSH,  /* everything is queued */
    OUT_STUCK,  /* will never end by itself */
};

struct conn {
    struct list_node node;       /* loop.conns or loop.dead */
    struct list_node ready_node; /* loop.ready */
    struct loop *loop;
    SSL *ssl; /* NULL: plain */
    struct timer timer;
    struct timer read_timer;
    char *out; /* queued bytes: out_off .. out_n */
    char *in;  /* received, not yet parsed: 0 .. in_n */
    char *tail;
    size_t out_off, out_n, out_cap;
    size_t in_n, in_cap;
    size_t tail_n;
    uint64_t fill_left; /* bytes of words between `out` and `tail` */
    uint64_t read_credit;
    int fd;
    uint32_t events; /* epoll events not yet handled */
    enum conn_in in_state;
    enum conn_out out_state;
    bool closed;
    bool close_after; /* when the response is complete */
    bool ending;      /* the last byte of the response is queued */
    bool read_again;  /* bytes may still wait in the socket */
    bool parsing;
    struct call call;
};

void conn_open(struct loop *l, int fd, bool tls);
/* Events are in c->events. May close. */
void conn_on_events(struct conn *c);
void conn_on_timer(struct conn *c, int kind);
/* The other side has closed its side or the connection broke. */
void conn_gone(struct conn *c);
/* Closes at once; the memory goes at the end of the turn. Uncounts its call first. */
void conn_close(struct conn *c, bool reset);
void conn_free(struct conn *c);
/* Writes, or queues, n bytes at p (copied). False: the connection was closed. */
MUST_CHECK bool conn_send(struct conn *c, const char *p, size_t n);
/* Queues fill bytes of words and then the tail (copied); a large answer is made as it is written. */
MUST_CHECK bool conn_send_fill(struct conn *c, uint64_t fill, const char *tail, size_t tail_n);
size_t conn_queued(const struct conn *c);
/* An answer is complete: goes on with what has come meanwhile. May close. */
void conn_resume(struct conn *c);

/* ---- mock_gzip.c ---- */

/* Makes t->p[at..t->n] the next part of a gzip stream, in place; `last` ends the stream. */
void gzip_wrap(struct call *call, struct text *t, size_t at, bool last);

/* ---- mock_ws.c ---- */

/* Answers an upgrade: 101, and from then on echoes frames. False: the connection was closed. */
MUST_CHECK bool ws_accept(struct conn *c, const struct head *h);
/* Takes bytes of the tunnel. May close. */
void ws_take(struct conn *c, struct slice *in);

#endif
