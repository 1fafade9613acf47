/*
 * mock_fault.c - the ways in which mock-llm can misbehave, one row each: `x-mock-fault: NAME`.
 *
 * A row names what happens (enum fault_act, carried out in mock_call.c), how the connection ends
 * afterwards, and the bytes that are sent as they stand here. `mock-llm --faults` prints this table.
 */
#include "mock.h"

#include <stdio.h>

#define OK_HEAD "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"

static const struct fault faults[] = {
    {"silent", FAULT_SILENT, FAULT_KEEP, NULL, "reads the request and never answers"},
    {"no-read", FAULT_NO_READ, FAULT_KEEP, NULL, "reads nothing after the head and never answers"},
    {"reset-before-head", FAULT_BEFORE_HEAD, FAULT_RST, NULL, "RST where the head was due"},
    {"close-before-head", FAULT_BEFORE_HEAD, FAULT_FIN, NULL, "FIN where the head was due"},
    {"reset-mid-head", FAULT_MID_HEAD, FAULT_RST, NULL, "half a head, then RST"},
    {"close-mid-head", FAULT_MID_HEAD, FAULT_FIN, NULL, "half a head, then FIN"},
    {"stall-mid-head", FAULT_MID_HEAD, FAULT_STALL, NULL, "half a head, then nothing"},
    {"reset-mid-body", FAULT_MID_BODY, FAULT_RST, NULL, "half the events or bytes, then RST"},
    {"close-mid-body", FAULT_MID_BODY, FAULT_FIN, NULL, "half the events or bytes, then FIN"},
    {"stall-mid-body", FAULT_MID_BODY, FAULT_STALL, NULL, "half the events or bytes, then nothing"},
    {"reset-mid-event", FAULT_MID_EVENT, FAULT_RST, NULL, "as reset-mid-body, in the middle of an event"},
    {"close-mid-event", FAULT_MID_EVENT, FAULT_FIN, NULL, "as close-mid-body, in the middle of an event"},
    {"stall-mid-event", FAULT_MID_EVENT, FAULT_STALL, NULL, "as stall-mid-body, in the middle of an event"},
    {"hold-after-done", FAULT_HOLD, FAULT_STALL, NULL,
     "all events and [DONE] but no last chunk (JSON: all but the last byte); ends after x-mock-hold-ms, or "
     "never"},
    {"early-response", FAULT_EARLY, FAULT_KEEP, NULL, "answers before the body was read, then reads it"},
    {"early-close", FAULT_EARLY, FAULT_FIN, NULL, "answers before the body was read, then closes"},
    {"100-continue", FAULT_INTERIM, FAULT_KEEP, "HTTP/1.1 100 Continue\r\n\r\n",
     "a 100 that nobody asked for"},
    {"102", FAULT_INTERIM, FAULT_KEEP, "HTTP/1.1 102 Processing\r\n\r\n", "a 102 first"},
    {"103", FAULT_INTERIM, FAULT_KEEP,
     "HTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\n\r\n"
     "HTTP/1.1 103 Early Hints\r\nlink: </b>; rel=preload\r\n\r\n",
     "two 103 first"},
    {"no-length", FAULT_NO_LENGTH, FAULT_FIN, NULL, "body ended by FIN"},
    {"no-length-reset", FAULT_NO_LENGTH, FAULT_RST, NULL, "body without length, ended by RST"},
    {"http10", FAULT_NO_LENGTH, FAULT_FIN, "HTTP/1.0", "an HTTP/1.0 response, body ended by FIN"},
    {"trailers", FAULT_TRAILERS, FAULT_KEEP, "x-mock-trailer: yes\r\nx-mock-second: 2\r\n",
     "chunked, with trailers"},
    {"bad-chunk", FAULT_BAD_CHUNK, FAULT_STALL, "zz\r\nhello\r\n", "a chunk size that is none"},
    {"huge-chunk", FAULT_BAD_CHUNK, FAULT_STALL, "fffffffffffffffff\r\nhello\r\n",
     "a chunk size above 64 bits"},
    {"chunk-junk", FAULT_BAD_CHUNK, FAULT_STALL, "5\r\nhelloXX\r\n", "bytes between chunk data and its CRLF"},
    {"chunk-lf", FAULT_BAD_CHUNK, FAULT_STALL, "5\nhello\n", "chunk lines ended by LF alone"},
    {"extra-bytes", FAULT_EXTRA, FAULT_KEEP, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nextra",
     "a second response behind the first"},
    {"obs-fold", FAULT_FIELD, FAULT_KEEP, "x-mock-folded: one\r\n two\r\n", "a folded field line"},
    {"big-head", FAULT_FIELD, FAULT_KEEP, NULL, "a field of 300 KB"},
    {"hop-by-hop", FAULT_FIELD, FAULT_KEEP,
     "connection: x-mock-hop\r\nx-mock-hop: 1\r\nkeep-alive: timeout=5\r\nproxy-authenticate: Basic\r\n",
     "fields that must not be forwarded"},
    {"cl-te", FAULT_RAW, FAULT_STALL,
     OK_HEAD "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
     "both Content-Length and Transfer-Encoding"},
    {"two-cl", FAULT_RAW, FAULT_STALL, OK_HEAD "content-length: 2\r\ncontent-length: 5\r\n\r\n{}",
     "two Content-Length that differ"},
    {"bad-cl", FAULT_RAW, FAULT_STALL, OK_HEAD "content-length: +2\r\n\r\n{}",
     "a Content-Length with a sign"},
    {"bad-te", FAULT_RAW, FAULT_STALL, OK_HEAD "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
     "an unknown coding"},
    {"bad-status", FAULT_RAW, FAULT_STALL, "HTTP/1.1 2x0 OK\r\ncontent-length: 2\r\n\r\n{}", "status 2x0"},
    {"status-99", FAULT_RAW, FAULT_STALL, "HTTP/1.1 099 Low\r\ncontent-length: 2\r\n\r\n{}", "status 099"},
    {"status-1000", FAULT_RAW, FAULT_STALL, "HTTP/1.1 1000 Up\r\ncontent-length: 2\r\n\r\n{}", "status 1000"},
    {"http2-version", FAULT_RAW, FAULT_STALL, "HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
     "HTTP/2.0 200"},
    {"not-http", FAULT_RAW, FAULT_FIN, "SSH-2.0-OpenSSH_9.2\r\n", "another protocol, then FIN"},
    {"bare-cr", FAULT_RAW, FAULT_STALL, "HTTP/1.1 200 OK\rcontent-length: 2\r\n\r\n{}",
     "status line ended by CR"},
    {"bare-lf", FAULT_RAW, FAULT_STALL, "HTTP/1.1 200 OK\ncontent-length: 2\n\n{}", "lines ended by LF"},
    {"space-colon", FAULT_RAW, FAULT_STALL, "HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\n{}",
     "space before a colon"},
    {"ctl-value", FAULT_RAW, FAULT_STALL, "HTTP/1.1 200 OK\r\nx-a: \x01\r\ncontent-length: 2\r\n\r\n{}",
     "a control byte in a value"},
    {"101-unasked", FAULT_RAW, FAULT_STALL,
     "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
     "a 101 to a plain call"},
    {"204-with-cl", FAULT_RAW, FAULT_KEEP, "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
     "204 with a Content-Length and no body; complete at its head"},
    {"204-with-te", FAULT_RAW, FAULT_KEEP, "HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n",
     "204 with Transfer-Encoding and no body; complete at its head"},
    {"304-with-cl", FAULT_RAW, FAULT_KEEP, "HTTP/1.1 304 Not Modified\r\ncontent-length: 123\r\n\r\n",
     "304 with a Content-Length and no body; complete at its head"},
    {"close-announced", FAULT_FIELD, FAULT_FIN, "connection: close\r\n", "Connection: close, then FIN"},
    {"408-idle", FAULT_IDLE, FAULT_FIN,
     "HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
     "a 408 on the idle connection before x-mock-idle-close-ms closes it"},
    {"reset-idle", FAULT_IDLE, FAULT_RST, NULL, "x-mock-idle-close-ms ends the idle connection by RST"},
};

const struct fault *fault_find(struct slice name)
{
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        if (slice_eq(name, slice_of(faults[i].name)))
            return &faults[i];
    }
    return NULL;
}

void fault_list(void)
{
    for (size_t i = 0; i < ARRAY_LEN(faults); i++)
        printf("%-18s %s\n", faults[i].name, faults[i].help);
}
