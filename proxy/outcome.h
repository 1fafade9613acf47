/*
 * outcome.h - how a call can end: one table for the log, the metrics and the
 * answer that the client gets.
 *
 * `who` names the side whose doing it was, `status` is what the client is told when no
 * response head has been sent yet (0: nothing can be sent or the upstream's own response stands).
 * Whether an SDK should try again follows from `retry` (header x-should-retry).
 */
#ifndef LG_OUTCOME_H
#define LG_OUTCOME_H

#include "base.h"

enum outcome_who { OUTCOME_BY_UPSTREAM, OUTCOME_BY_CLIENT, OUTCOME_BY_GATE, OUTCOME_BY_REDIS };

/* X(id, word, who, status, retry, message) */
#define OUTCOMES(X)                                                                                          \
    X(DONE, "done", UPSTREAM, 0, false, "")                                                                  \
    X(LIMIT_FULL, "limit_full", GATE, 429, true, "all slots of this limit are in use")                       \
    X(REDIS_UNAVAILABLE, "redis_unavailable", REDIS, 429, true, "the limiter's Redis cannot be reached")     \
    X(REDIS_ERROR, "redis_error", REDIS, 429, true, "the limiter's Redis refused the command")               \
    X(DRAINING, "draining", GATE, 429, true, "this gateway is shutting down")                                \
    X(BODY_MEMORY, "body_memory", GATE, 429, true, "too many request bodies are waiting for admission")      \
    X(NO_MEMORY, "no_memory", GATE, 503, true, "the gateway is out of memory")                               \
    X(BAD_REQUEST, "bad_request", CLIENT, 400, false, "the request is not well-formed HTTP/1.1")             \
    X(BAD_MODEL, "bad_model", CLIENT, 400, false, "the model cannot be told from the request")               \
    X(MODEL_MISSING, "model_missing", CLIENT, 400, false, "the request must name a model")                   \
    X(NO_ROUTE, "no_route", CLIENT, 404, false, "no route is configured for this path")                      \
    X(BODY_TOO_LARGE, "body_too_large", CLIENT, 413, false, "the request body is too large")                 \
    X(BODY_CODING, "body_coding", CLIENT, 415, false, "the request body's content coding is not supported")  \
    X(REQUEST_TIMEOUT, "request_timeout", CLIENT, 408, true, "the request did not arrive in time")           \
    X(TOO_MANY_LIMITS, "too_many_limits", GATE, 500, false,                                                  \
      "more limits count this call than are supported")                                                      \
    X(UPSTREAM_UNREACHABLE, "upstream_unreachable", UPSTREAM, 502, true, "the upstream cannot be reached")   \
    X(UPSTREAM_TLS, "upstream_unreachable", UPSTREAM, 502, true,                                             \
      "no TLS connection to the upstream can be made")                                                       \
    X(UPSTREAM_CLOSED, "upstream_closed", UPSTREAM, 502, true, "the upstream closed the connection")         \
    X(UPSTREAM_BAD, "upstream_invalid", UPSTREAM, 502, true, "the upstream sent an invalid response")        \
    X(CONNECT_TIMEOUT, "upstream_timeout", UPSTREAM, 504, true,                                              \
      "the upstream did not accept a connection in time")                                                    \
    X(SEND_TIMEOUT, "upstream_timeout", UPSTREAM, 504, true,                                                 \
      "the upstream did not take the request in time")                                                       \
    X(FIRST_BYTE_TIMEOUT, "upstream_timeout", UPSTREAM, 504, true, "the upstream did not answer in time")    \
    X(IDLE_TIMEOUT, "upstream_timeout", UPSTREAM, 504, true, "the upstream fell silent")                     \
    X(TOTAL_TIMEOUT, "total_timeout", GATE, 504, true, "the call took longer than is allowed")               \
    X(DONE_GRACE, "done_unclosed", UPSTREAM, 0, false, "")                                                   \
    X(CLIENT_GONE, "client_gone", CLIENT, 0, false, "")                                                      \
    X(CLIENT_STALLED, "client_stalled", CLIENT, 0, false, "the client stopped reading")                      \
    X(LEASE_LOST, "lease_lost", REDIS, 503, true, "the call's slot was lost")                                \
    X(DRAIN_CUT, "drain_timeout", GATE, 503, true, "this gateway had to shut down")

enum outcome {
#define X(id, word, who, status, retry, message) OUTCOME_##id,
    OUTCOMES(X)
#undef X
        OUTCOME_COUNT
};

/* In which phase of its life a call ended. */
#define OUTCOME_PHASES(X)                                                                                    \
    X(HEAD, "head")     /* the request head: parsing, routing */                                             \
    X(SCAN, "scan")     /* reading the body for its model */                                                 \
    X(ADMIT, "admit")   /* waiting for a lease */                                                            \
    X(DIAL, "dial")     /* waiting for a connection */                                                       \
    X(SEND, "send")     /* the request goes out, no response byte yet */                                     \
    X(WAIT, "wait")     /* the request is out, no response head yet */                                       \
    X(RELAY, "relay")   /* the response passes */                                                            \
    X(TUNNEL, "tunnel") /* an upgraded connection */                                                         \
    X(DRAIN, "drain")   /* the client has gone, the upstream is read to its end */

enum outcome_phase {
#define X(id, word) OUTCOME_PHASE_##id,
    OUTCOME_PHASES(X)
#undef X
        OUTCOME_PHASE_COUNT
};

struct outcome_info {
    const char *word; /* x-leasegate-reason, log and metric label */
    const char *message;
    uint16_t status;
    uint8_t who;
    bool retry;
};

const struct outcome_info *outcome_info(enum outcome o);
const char *outcome_who_word(enum outcome_who who);
const char *outcome_phase_word(enum outcome_phase p);

#endif
