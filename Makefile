# Makefile - builds leasegate, its bench programs, unit tests and fuzzers.
#
#   make run      installs what is missing, builds, starts a mock LLM API and leasegate in front of it
#   make test     installs what is missing, builds, runs every test
#   make help     everything else
#
# Variables: CC=clang, SAN=address,undefined or SAN=thread (own build directory each), V=1 (whole commands),
# LTO=1, WERROR=0 (a compiler newer than ours may warn about more), CFLAGS, LDFLAGS, PREFIX, DESTDIR.
#
# Sources are found by wildcard: a new proxy/x.c, lua/x.lua or tests/unit/test_x.c needs no line here.

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.SECONDARY:
SHELL := /bin/bash

CFLAGS ?= -O2 -g
PREFIX ?= /usr/local
PKG_CONFIG ?= pkg-config
FUZZ_SECONDS ?= 60
SAN ?=
FUZZ ?=
LTO ?=
WERROR ?= 1
V ?= 0

comma := ,
ifneq ($(FUZZ),)
B := build/fuzz
else ifneq ($(SAN),)
B := build/san-$(subst $(comma),-,$(SAN))
else
B := build
endif
GEN := build/gen

# ---- what the code needs ----------------------------------------------------------------------------------------

PKGS := libuv hiredis openssl zlib libzstd libconfuse
PKG_CFLAGS := $(shell $(PKG_CONFIG) --cflags $(PKGS) 2>/dev/null)
PKG_LIBS := $(shell $(PKG_CONFIG) --libs $(PKGS) 2>/dev/null)
CMOCKA_CFLAGS := $(shell $(PKG_CONFIG) --cflags cmocka 2>/dev/null)
CMOCKA_LIBS := $(shell $(PKG_CONFIG) --libs cmocka 2>/dev/null || echo -lcmocka)

# llhttp is a library where the distribution packages one; Debian 12 has its C sources in node-llhttp instead.
LLHTTP_SRC :=
ifeq ($(shell $(PKG_CONFIG) --exists libllhttp 2>/dev/null && echo yes),yes)
LLHTTP_CFLAGS := $(shell $(PKG_CONFIG) --cflags libllhttp)
LLHTTP_LIBS := $(shell $(PKG_CONFIG) --libs libllhttp)
else ifneq ($(wildcard /usr/include/llhttp.h /usr/local/include/llhttp.h),)
LLHTTP_CFLAGS :=
LLHTTP_LIBS := -lllhttp
else
LLHTTP_SHARE ?= /usr/share
LLHTTP_SRC := $(wildcard $(LLHTTP_SHARE)/llhttp/api.c $(LLHTTP_SHARE)/llhttp/http.c $(LLHTTP_SHARE)/llhttp/llhttp.c)
LLHTTP_CFLAGS := -isystem $(LLHTTP_SHARE)/include/llhttp
LLHTTP_LIBS :=
endif
# llhttp 8 parses strictly only when told so; llhttp 9 always does and ignores the macro.
LLHTTP_CFLAGS += -DLLHTTP_STRICT_MODE=1

# ---- flags ------------------------------------------------------------------------------------------------------

# $(call cc_try,FLAGS): FLAGS if the compiler and its libc take them without a word, else nothing.
hash := \#
cc_try = $(shell printf '%s\n' '$(hash)include <stdio.h>' 'int main(void) { return 0; }' | \
	$(CC) -x c -O2 -Werror $(1) -c -o /dev/null - >/dev/null 2>&1 && echo '$(1)')

WARN := -Wall -Wextra -Wshadow -Wundef -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith \
	-Wwrite-strings -Wformat=2
ifneq ($(WERROR),0)
WARN += -Werror
endif

LG_CFLAGS := -std=c11 -D_GNU_SOURCE -fPIE -pthread
LG_LDFLAGS := -pie -pthread -Wl,-z,relro,-z,now -Wl,--as-needed
ifneq ($(SAN)$(FUZZ),)
comma_join = $(subst $(eval) ,$(comma),$(strip $(1)))
SAN_FLAGS := -fsanitize=$(call comma_join,$(SAN) $(if $(FUZZ),fuzzer-no-link)) -fno-sanitize-recover=all \
	-fno-omit-frame-pointer
LG_CFLAGS += $(SAN_FLAGS)
LG_LDFLAGS += $(SAN_FLAGS)
else
LG_CFLAGS += -fstack-protector-strong $(call cc_try,-fstack-clash-protection) $(call cc_try,-fcf-protection) \
	$(or $(call cc_try,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
endif
ifneq ($(LTO),)
LG_CFLAGS += $(or $(call cc_try,-flto=auto),-flto)
LG_LDFLAGS += $(or $(call cc_try,-flto=auto),-flto)
AR := $(if $(findstring clang,$(CC)),llvm-ar,gcc-ar)
endif

CPPFLAGS_ALL := -I. -Iproxy -Iconfig -I$(GEN) $(PKG_CFLAGS) $(LLHTTP_CFLAGS) $(CPPFLAGS)
COMPILE = $(CC) $(LG_CFLAGS) $(CFLAGS) $(WARN) $(CPPFLAGS_ALL) -MMD -MP
LINK = $(CC) $(LG_CFLAGS) $(CFLAGS) $(LG_LDFLAGS) $(LDFLAGS)
LIBS = $(PKG_LIBS) $(LLHTTP_LIBS) -lm

ifeq ($(V),0)
say = @printf '%-6s %s\n' '$(1)' '$(2)';
else
Q :=
say =
endif

# ---- files ------------------------------------------------------------------------------------------------------

LIB_SRC := $(filter-out proxy/main.c,$(wildcard proxy/*.c config/*.c))
LUA_SRC := $(wildcard lua/*.lua)
UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT_SHARED := $(filter-out $(UNIT_SRC),$(wildcard tests/unit/*.c))
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
BENCH_MOCK := $(wildcard bench/mock-llm.c bench/mock_*.c)
BENCH_LOAD := $(wildcard bench/loadgen.c bench/load_*.c)
BENCH_SCAN := $(wildcard bench/scanbench.c bench/scan_*.c)
BENCH_SHARED := $(filter-out $(BENCH_MOCK) $(BENCH_LOAD) $(BENCH_SCAN),$(wildcard bench/*.c))

obj = $(patsubst %.c,$(B)/obj/%.o,$(1))
# Third-party sources keep only their names: they live outside the tree.
LLHTTP_OBJ := $(patsubst %.c,$(B)/obj/llhttp/%.o,$(notdir $(LLHTTP_SRC)))
GEN_SRC := $(GEN)/lua_scripts.c
GEN_HDR := $(GEN_SRC:.c=.h)
LIB_OBJ := $(call obj,$(LIB_SRC)) $(patsubst $(GEN)/%.c,$(B)/obj/gen/%.o,$(GEN_SRC)) $(LLHTTP_OBJ)
LIB := $(B)/libleasegate.a

PROGRAMS := $(if $(wildcard proxy/main.c),$(B)/leasegate) $(if $(wildcard bench/mock-llm.c),$(B)/mock-llm) \
	$(if $(wildcard bench/loadgen.c),$(B)/loadgen) $(if $(wildcard bench/scanbench.c),$(B)/scanbench)
UNIT_BIN := $(patsubst tests/unit/%.c,$(B)/tests/%,$(UNIT_SRC))
FUZZ_BIN := $(patsubst tests/fuzz/%.c,$(B)/%,$(FUZZ_SRC))
ALL_C := $(wildcard proxy/*.[ch] config/*.[ch] bench/*.[ch] tests/unit/*.[ch] tests/fuzz/*.[ch])

# ---- build ------------------------------------------------------------------------------------------------------

.PHONY: all lib unit-programs
all: $(PROGRAMS)
lib: $(LIB)
unit-programs: $(UNIT_BIN)

# A file that holds TEXT and is touched only when TEXT changes: $(eval $(call text_file,FILE,TEXT)).
.PHONY: FORCE
define text_file
$(1): FORCE
	@mkdir -p $$(@D); printf '%s\n' '$(2)' | cmp -s - $$@ || printf '%s\n' '$(2)' >$$@
endef

# Objects depend on the compiler and flags they were made with, so CC=clang after gcc builds anew; what is made of a
# list of files depends on the list, so a file that went away leaves nothing behind.
FLAGS_STAMP := $(B)/flags
LIB_STAMP := $(B)/members
GEN_STAMP := $(GEN)/members
$(eval $(call text_file,$(FLAGS_STAMP),$(COMPILE) | $(LINK) $(LIBS) $(AR)))
$(eval $(call text_file,$(LIB_STAMP),$(LIB_OBJ)))
$(eval $(call text_file,$(GEN_STAMP),$(LUA_SRC)))

$(B)/obj/%.o: %.c $(FLAGS_STAMP) | $(GEN_HDR)
	@mkdir -p $(@D)
	$(call say,CC,$<)$(COMPILE) $(if $(filter tests/unit/%,$<),$(CMOCKA_CFLAGS)) -c -o $@ $<

$(B)/obj/gen/%.o: $(GEN)/%.c $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,CC,$<)$(COMPILE) -c -o $@ $<

# Not our code, so not our warnings.
$(B)/obj/llhttp/%.o: $(LLHTTP_SHARE)/llhttp/%.c $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,CC,llhttp/$(<F))$(CC) $(LG_CFLAGS) $(CFLAGS) $(LLHTTP_CFLAGS) -w -c -o $@ $<

$(LIB): $(LIB_OBJ) $(FLAGS_STAMP) $(LIB_STAMP)
	$(call say,AR,$@)rm -f $@ && $(AR) crs $@ $(LIB_OBJ)

$(B)/leasegate: $(call obj,proxy/main.c) $(LIB)
	$(call say,LD,$@)$(LINK) -o $@ $^ $(LIBS)

$(B)/mock-llm: $(call obj,$(BENCH_MOCK) $(BENCH_SHARED)) $(LIB)
	$(call say,LD,$@)$(LINK) -o $@ $^ $(LIBS)
$(B)/loadgen: $(call obj,$(BENCH_LOAD) $(BENCH_SHARED)) $(LIB)
	$(call say,LD,$@)$(LINK) -o $@ $^ $(LIBS)
$(B)/scanbench: $(call obj,$(BENCH_SCAN) $(BENCH_SHARED)) $(LIB)
	$(call say,LD,$@)$(LINK) -o $@ $^ $(LIBS)

$(B)/tests/%: $(B)/obj/tests/unit/%.o $(call obj,$(UNIT_SHARED)) $(LIB)
	@mkdir -p $(@D)
	$(call say,LD,$@)$(LINK) -o $@ $^ $(CMOCKA_LIBS) $(LIBS)

# The Lua scripts travel inside the binary.
$(GEN)/lua_scripts.c $(GEN)/lua_scripts.h &: $(LUA_SRC) tools/embed.sh $(GEN_STAMP)
	$(call say,GEN,$(GEN)/lua_scripts.c)tools/embed.sh $(GEN)/lua_scripts lua $(LUA_SRC)

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)

# ---- run, test --------------------------------------------------------------------------------------------------

# Dependencies are installed first and make is called anew, since flags above are found by asking what is installed.
# One job a core, unless -j was given.
JOBS = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || echo 2))
SUB = +@$(MAKE) --no-print-directory $(JOBS)
export LEASEGATE_BUILD := $(B)

.PHONY: run deps
run:
	@tools/deps.sh run
	$(SUB) all
	@tools/run.sh
deps:
	@tools/deps.sh build run test lint fuzz

.PHONY: test test-unit test-lua test-flow test-fault run-tests
test: STAGES := unit lua flow fault
test-unit: STAGES := unit
test-lua: STAGES := lua
test-flow: STAGES := flow
test-fault: STAGES := fault
test test-unit test-lua test-flow test-fault:
	@tools/deps.sh test
	$(SUB) run-tests STAGES='$(STAGES)'

run-tests: all $(if $(filter unit,$(STAGES)),unit-programs)
	@SAN='$(SAN)' tools/run-tests.sh $(STAGES)

# ---- fuzz, bench ------------------------------------------------------------------------------------------------

.PHONY: fuzz fuzz-programs bench
fuzz:
	@tools/deps.sh build fuzz
	$(SUB) fuzz-programs CC=clang SAN=address,undefined FUZZ=1
	@FUZZ_SECONDS='$(FUZZ_SECONDS)' tools/fuzz.sh
fuzz-programs: $(if $(FUZZ),$(FUZZ_BIN))
ifneq ($(FUZZ),)
$(B)/fuzz_%: $(B)/obj/tests/fuzz/fuzz_%.o $(LIB)
	$(call say,LD,$@)$(LINK) -fsanitize=fuzzer -o $@ $^ $(LIBS)
endif

bench:
	@tools/deps.sh run bench
	$(SUB) all
	@bench/run.sh $(BENCH)

# ---- lint -------------------------------------------------------------------------------------------------------

# A second opinion, not a gate: gcc's analyzer knows little of ownership that outlives a function.
.PHONY: analyze
analyze:
	$(SUB) lib B=build/analyze WERROR=0 CFLAGS='-O1 -g -fanalyzer'

.PHONY: lint lint-run lint-format lint-tidy lint-cppcheck lint-tree lint-shell format
lint:
	@tools/deps.sh build lint
	$(SUB) lint-run
lint-run: lint-tree lint-shell lint-format lint-cppcheck lint-tidy

lint-tree:
	$(call say,LINT,layers)node tools/lint-layers.mjs
	$(call say,LINT,banned calls)node tools/lint-banned.mjs
	$(call say,LINT,paths)node tools/lint-paths.mjs
	$(call say,LINT,tables)node tools/lint-tables.mjs

lint-shell:
	$(call say,LINT,shellcheck)shellcheck $(wildcard tools/*.sh bench/*.sh .ci/run)

# Other versions of clang-format lay out some lines differently, so one of them is the judge.
CLANG_FORMAT ?= $(firstword $(shell command -v clang-format-14) clang-format)
FORMAT_IS_14 = $(findstring version 14.,$(shell $(CLANG_FORMAT) --version 2>/dev/null))
lint-format:
ifneq ($(FORMAT_IS_14),)
	$(call say,LINT,clang-format)$(CLANG_FORMAT) --dry-run -Werror $(ALL_C)
else
	@echo 'LINT   clang-format: not judged, the code is laid out by version 14 and this is another'
endif

format:
	$(CLANG_FORMAT) -i $(ALL_C)

# Every check that is off, and why: .clang-tidy. GCC's own flags stay away from clang's front end.
TIDY_SRC := $(wildcard proxy/*.c config/*.c bench/*.c tests/unit/*.c)
lint-tidy: $(GEN_HDR)
	$(call say,LINT,clang-tidy)printf '%s\n' $(TIDY_SRC) | xargs -P 2 -n 4 sh -c \
		'clang-tidy --quiet --warnings-as-errors="*" "$$@" -- -std=c11 -D_GNU_SOURCE $(CPPFLAGS_ALL) \
		$(CMOCKA_CFLAGS) 2>&1 | { ! grep -E "(warning|error):" -A6; }' tidy

lint-cppcheck: $(GEN_HDR)
	$(call say,LINT,cppcheck)cppcheck --quiet --error-exitcode=1 --std=c11 --inline-suppr -j 2 \
		--enable=warning,performance,portability --suppressions-list=tools/cppcheck.txt \
		-D__GNUC__=12 -D_GNU_SOURCE -DLLHTTP_STRICT_MODE=1 -I. -Iproxy -Iconfig -I$(GEN) \
		$(wildcard proxy/*.c config/*.c bench/*.c)

# ---- install, clean, help ---------------------------------------------------------------------------------------

.PHONY: install clean distclean help
install: all
	install -D -m 755 $(B)/leasegate $(DESTDIR)$(PREFIX)/bin/leasegate
	install -D -m 644 proxy.conf.example $(DESTDIR)$(PREFIX)/share/doc/leasegate/proxy.conf.example
	$(if $(wildcard deploy/leasegate.service),install -D -m 644 deploy/leasegate.service \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/leasegate.service)

clean:
	rm -rf build
distclean: clean
	rm -rf node_modules

help:
	@sed -n '3,8s/^# \{0,1\}//p' Makefile
	@echo
	@echo '  make all | lib | lint | analyze | format | fuzz | bench | install | clean | distclean | deps'
	@echo '  make test-unit | test-lua | test-flow | test-fault     one kind of test; TESTS=part-of-a-path for fewer'
