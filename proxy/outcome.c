/*
 * outcome.c - the table of outcomes.
 */
#include "outcome.h"

static const struct outcome_info infos[OUTCOME_COUNT] = {
#define X(id, word_, who_, status_, retry_, message_)                                                        \
    [OUTCOME_##id] = {.word = (word_),                                                                       \
                      .message = (message_),                                                                 \
                      .status = (status_),                                                                   \
                      .who = OUTCOME_BY_##who_,                                                              \
                      .retry = (retry_)},
    OUTCOMES(X)
#undef X
};

static const char *const phase_words[OUTCOME_PHASE_COUNT] = {
#define X(id, word) [OUTCOME_PHASE_##id] = (word),
    OUTCOME_PHASES(X)
#undef X
};

const struct outcome_info *outcome_info(enum outcome o)
{
    BUG_ON(o >= OUTCOME_COUNT);
    return &infos[o];
}

const char *outcome_who_word(enum outcome_who who)
{
    static const char *const words[] = {"upstream", "client", "gate", "redis"};

    return words[who];
}

const char *outcome_phase_word(enum outcome_phase p)
{
    BUG_ON(p >= OUTCOME_PHASE_COUNT);
    return phase_words[p];
}
