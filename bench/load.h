/*
 * load.h - the words that the files of loadgen share.
 *
 *   loadgen.c      options, the loop, progress       load_slot.c    one connection and the calls on it
 *   load_parse.c   responses, from bytes to facts    load_report.c  histograms, results as text and JSON
 *
 * One thread, one epoll, edge-triggered. A slot is one place in the concurrency: it has at most one call
 * and one connection at a time. Times are CLOCK_MONOTONIC nanoseconds.
 */
#ifndef LOAD_H
#define LOAD_H

#include "../proxy/base.h"
#include "../proxy/str.h"
#include "chunked.h"
#include "timers.h"

#include <sys/socket.h>

enum {
    LOAD_HEAD_MAX = 64 * 1024,
    LOAD_REFUSAL_MAX = 8 * 1024, /* of a 429's body that is looked at */
    LOAD_READ_SIZE = 128 * 1024,
    LOAD_CARRY = 48,
};

struct options {
    const char *url, *unix_path;
    const char *models;
    const char **headers; /* owned */
    size_t header_count;
    char host[256];
    char path[2048];
    unsigned port;
    unsigned concurrency, tenants, seed;
    uint64_t duration_ns, drain_ns, timeout_ns, think_ns, requests;
    double rate, abort_rate;
    int64_t events, delay_ms, ttft_ms, response_bytes; /* -1: not said */
    size_t body_bytes;
    int pin_cpu; /* -1: none */
    bool stream, json, quiet;
};

/* ---- load_report.c ---- */

/* Log-linear histogram: 128 steps per power of two, so a value is known within 0.8 %. */
enum {
    HIST_STEP_BITS = 7,
    HIST_STEPS = 1 << HIST_STEP_BITS,
    HIST_CELLS = (64 - HIST_STEP_BITS) * HIST_STEPS
};

struct hist {
    uint64_t cells[HIST_CELLS];
    uint64_t n, max_ns;
    double sum_ns;
};

void hist_add(struct hist *h, uint64_t ns);
/* The value below which the fraction q of all lies; 0 when there are none. */
uint64_t hist_quantile(const struct hist *h, double q);

enum load_error {
    ERROR_CONNECT, /* refused, unreachable */
    ERROR_RESET,
    ERROR_NO_RESPONSE, /* closed before a byte of the response */
    ERROR_CUT,         /* closed within a response */
    ERROR_BAD_RESPONSE,
    ERROR_TIMEOUT,
    ERROR_KINDS,
};

/* What a 429 must be; each that fails is counted. */
enum refusal_check {
    CHECK_LENGTH,
    CHECK_TYPE,
    CHECK_BODY,
    CHECK_RETRY_AFTER,
    CHECK_RETRY_AFTER_MS,
    CHECK_SHOULD_RETRY,
    CHECK_REASON,
    CHECK_REQUEST_ID,
    CHECK_KINDS,
};

enum { REASONS_MAX = 32, REASON_NAME_MAX = 48 };

struct results {
    struct hist total, ttfb, inter_event, lag, wait;
    uint64_t started, completed, unfinished, status[600];
    uint64_t errors[ERROR_KINDS];
    uint64_t malformed, failed_checks[CHECK_KINDS];
    uint64_t aborted_early, aborted_late, connects, bytes_in, events, late_arrivals;
    struct {
        char name[REASON_NAME_MAX];
        uint64_t n;
    } reasons[REASONS_MAX];
    uint64_t start_ns, end_ns;
    uint64_t in_window; /* completed before the end of the measured time */
};

void results_reason(struct results *r, struct slice name);
void results_print(const struct results *r, const struct options *o);
void results_print_json(const struct results *r, const struct options *o);
void results_progress(const struct results *r, const struct results *before, double seconds,
                      unsigned in_flight);

/* ---- load_parse.c ---- */

enum response_state {
    RESPONSE_HEAD,
    RESPONSE_LENGTH,
    RESPONSE_CHUNKED,
    RESPONSE_CLOSE,
    RESPONSE_DONE,
    RESPONSE_BAD
};

struct response {
    enum response_state state;
    uint64_t left; /* of a body with a length */
    struct chunked chunked;
    uint64_t events;
    uint64_t last_event_ns;
    unsigned status;
    unsigned failed_checks; /* bits of enum refusal_check: facts of the head that a 429 lacks */
    bool close, sse, has_wait;
    uint8_t newlines; /* at the end of what was seen: two in a row end an event */
    uint8_t carried;
    char carry[LOAD_CARRY];
    uint64_t wait_ms;
    char reason[REASON_NAME_MAX];
    char *refusal; /* owned: the body of a 429 */
    size_t refusal_n;
};

void response_init(struct response *r);
/*
 * Takes bytes that were read at now_ns; *in is what remains (a partial head is left there). Events and
 * lags go to the results. 1xx responses are skipped.
 */
void response_take(struct response *r, struct slice *in, uint64_t now_ns, struct results *res);
/* The connection has ended: true when that completes the response. */
bool response_eof(struct response *r);
/* Checks and counts a complete 429. */
void response_check_refusal(struct response *r, struct results *res);
bool json_valid(struct slice text);

/* ---- load_slot.c ---- */

struct request {
    char *head; /* owned */
    size_t head_n;
    const char *body; /* of the model, shared by tenants */
    size_t body_n;
};

struct load;

enum slot_state { SLOT_IDLE, SLOT_CONNECTING, SLOT_SENDING, SLOT_WAITING, SLOT_READING };

struct slot {
    struct load *load;
    const struct request *request;
    struct timer pause; /* think time, or back-off after an error */
    struct timer limit; /* timeout, or a planned abort */
    struct list_node idle_node;
    struct response response;
    uint64_t begun_ns; /* when the call was due */
    uint64_t sent;
    char *held; /* a partial head */
    size_t held_n;
    uint64_t abort_after_events; /* 0: none planned */
    int fd;
    enum slot_state state;
    bool abort_planned;
    bool got_byte;
};

struct load {
    struct options options;
    struct results results;
    struct timers timers;
    struct sockaddr_storage address;
    socklen_t address_n;
    struct request *requests;
    size_t request_count;
    struct slot *slots;
    struct list idle; /* slots without a call, for the open loop */
    char *read_buffer;
    uint64_t now_ns;
    uint64_t random;
    unsigned in_flight;
    int epoll_fd;
    bool stopping;
};

uint64_t load_random(struct load *l);
double load_uniform(struct load *l); /* 0 <= x < 1 */
/* A slot has nothing to do: the loop decides (loadgen.c). */
void load_slot_free(struct slot *s, bool after_error);

/* Begins a call that was due at due_ns. */
void slot_begin(struct slot *s, uint64_t due_ns);
void slot_on_events(struct slot *s, uint32_t events);
void slot_on_limit(struct slot *s);
/* Gives up the call and the connection without counting it. */
void slot_drop(struct slot *s);

#endif
