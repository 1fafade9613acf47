/*
 * metrics.h - what is counted, in one table each for counters, gauges and
 * histograms; the text for Prometheus is made from the same tables.
 *
 * Each thread counts in memory of its own (a relaxed store, no lock, no shared cache line); the
 * sum is made by whoever scrapes. Labels come from bounded sets only: outcomes, phases, and the names of limits and
 * upstreams that a configuration has had in this process.
 */
#ifndef LG_METRICS_H
#define LG_METRICS_H

#include "buf.h"
#include "outcome.h"

/* X(id, name, help) */
#define METRICS_COUNTERS(X)                                                                                  \
    X(CLIENT_CONNECTIONS, "leasegate_client_connections_total", "Connections accepted from clients.")        \
    X(CLIENT_BYTES_IN, "leasegate_client_body_bytes_received_total",                                         \
      "Request body bytes read from clients.")                                                               \
    X(CLIENT_BYTES_OUT, "leasegate_client_body_bytes_sent_total", "Response body bytes passed to clients.")  \
    X(UPSTREAM_DIALS, "leasegate_upstream_connections_total", "Connections made to upstreams.")              \
    X(UPSTREAM_REUSES, "leasegate_upstream_connection_reuses_total",                                         \
      "Calls served by an idle pooled connection.")                                                          \
    X(UPSTREAM_REPLAYS, "leasegate_upstream_replays_total",                                                  \
      "Calls sent again because a reused connection was dead.")                                              \
    X(LEASES_GRANTED, "leasegate_leases_granted_total", "Leases granted.")                                   \
    X(LEASES_RELEASED, "leasegate_leases_released_total", "Leases given back.")                              \
    X(LEASES_RESTORED, "leasegate_leases_restored_total",                                                    \
      "Renewals that found their lease gone and put it back.")                                               \
    X(LEASES_OVER, "leasegate_leases_over_total", "Renewals that put a lease back over its limit.")          \
    X(LEASES_LOST, "leasegate_leases_lost_total", "Leases lost under strict, their calls ended.")            \
    X(LEASES_UNKNOWN, "leasegate_leases_unknown_total", "Lease requests whose answer never came.")           \
    X(UNCOUNTED, "leasegate_uncounted_calls_total", "Calls let through without a lease during an outage.")   \
    X(REDIS_COMMANDS, "leasegate_redis_commands_total", "Commands sent to Redis.")                           \
    X(REDIS_FAILURES, "leasegate_redis_failures_total",                                                      \
      "Times that Redis was given up and the breaker opened.")                                               \
    X(RELOADS, "leasegate_config_reloads_total", "Configurations loaded.")                                   \
    X(RELOAD_FAILURES, "leasegate_config_reload_failures_total", "Configurations refused.")                  \
    X(ACCEPT_FAILURES, "leasegate_accept_failures_total", "Connections that could not be accepted.")         \
    X(LOG_LINES_DROPPED, "leasegate_log_lines_dropped_total", "Log lines lost to a full queue.")

#define METRICS_GAUGES(X)                                                                                    \
    X(CLIENTS, "leasegate_client_connections", "Client connections open.")                                   \
    X(CALLS, "leasegate_calls_in_flight", "Calls that have begun and not ended.")                            \
    X(LEASES_HELD, "leasegate_leases_held", "Leases held by this instance.")                                 \
    X(RELEASES_OWED, "leasegate_releases_owed", "Releases that could not be delivered to Redis yet.")        \
    X(REDIS_UP, "leasegate_redis_up_threads", "Threads whose connection to Redis is usable.")                \
    X(BODY_MEMORY, "leasegate_body_memory_bytes", "Request bodies held while their calls wait.")             \
    X(POOL_IDLE, "leasegate_upstream_idle_connections", "Idle pooled connections to upstreams.")             \
    X(STREAMS, "leasegate_streams", "Sockets open, of all kinds.")

/* in microseconds inside, seconds outside */
#define METRICS_HISTOGRAMS(X)                                                                                \
    X(WAIT, "leasegate_wait_seconds", "From the request to its lease.")                                      \
    X(FIRST_BYTE, "leasegate_time_to_first_byte_seconds", "From the request to the response head.")          \
    X(DURATION, "leasegate_call_duration_seconds", "From the request to the end of the call.")               \
    X(REDIS_ROUND_TRIP, "leasegate_redis_round_trip_seconds", "From sending a command to its reply.")        \
    X(LOOP_TURN, "leasegate_loop_turn_seconds",                                                              \
      "Time that an event loop spent in one turn, per sample the longest.")

enum metrics_counter {
#define X(id, name, help) METRICS_##id,
    METRICS_COUNTERS(X)
#undef X
        METRICS_COUNTER_COUNT
};

enum metrics_gauge {
#define X(id, name, help) METRICS_GAUGE_##id,
    METRICS_GAUGES(X)
#undef X
        METRICS_GAUGE_COUNT
};

enum metrics_histogram {
#define X(id, name, help) METRICS_HISTOGRAM_##id,
    METRICS_HISTOGRAMS(X)
#undef X
        METRICS_HISTOGRAM_COUNT
};

#define METRICS_LIMITS_MAX                                                                                   \
    256 /* names of limits that this process has known; later ones share the last row, "(other)" */

/* Boot of a thread that counts / its end (what it has counted stays in the sums). */
void metrics_thread_begin(void);
void metrics_thread_end(void);
/* At exit of the process, after all threads have ended. */
void metrics_free(void);

void metrics_add(enum metrics_counter c, uint64_t n);
/* For a count that its owner keeps itself: this thread's total so far. */
void metrics_total(enum metrics_counter c, uint64_t total);
void metrics_set(enum metrics_gauge g, int64_t value);
void metrics_observe_us(enum metrics_histogram h, uint64_t us);

/* The row of a limit's name; any thread, cheap enough for each reload only. */
unsigned metrics_limit_row(const char *name);
void metrics_limit_held(unsigned row, int delta);
void metrics_limit_granted(unsigned row);
void metrics_limit_refused(unsigned row);
/* Main thread: what the present configuration says (per scope). */
void metrics_limit_cap(unsigned row, uint32_t cap);

/* A call has ended. */
void metrics_call_ended(enum outcome o, enum outcome_phase p, unsigned client_status);

/* The exposition (Prometheus text format 0.0.4). False: no memory. Any thread. */
MUST_CHECK bool metrics_write(struct buf *out);

#endif
