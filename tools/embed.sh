#!/bin/bash
# embed.sh OUT PREFIX [NAME=]FILE... - writes OUT.c and OUT.h, in which each file is a constant:
#
#   extern const char PREFIX_NAME[];        the bytes, and one NUL after them
#   extern const size_t PREFIX_NAME_len;    how many bytes, without that NUL
#
# NAME is the file's base name (for .lua without the extension), other characters than [A-Za-z0-9] as `_`. Octal
# escapes are used because, unlike \x, they end after three digits whatever follows.
set -euo pipefail

out=$1 prefix=$2
shift 2
mkdir -p "$(dirname "$out")"
guard=LG_GEN_$(basename "$out" | tr 'a-z-' 'A-Z_')_H

{
    printf '/* Made by tools/embed.sh; do not edit. */\n#ifndef %s\n#define %s\n\n#include <stddef.h>\n' "$guard" "$guard"
} >"$out.h.new"
printf '/* Made by tools/embed.sh; do not edit. */\n#include "%s.h"\n' "$(basename "$out")" >"$out.c.new"

for item in "$@"; do
    file=${item#*=}
    case $item in
    *=*) name=${item%%=*} ;;
    *) name=$(basename "$file" .lua) ;;
    esac
    symbol=${prefix}_$(printf '%s' "$name" | tr -c 'A-Za-z0-9' '_')
    printf '\nextern const char %s[];\nextern const size_t %s_len;\n' "$symbol" "$symbol" >>"$out.h.new"
    {
        printf '\nconst char %s[] =\n' "$symbol"
        od -An -v -to1 -w24 "$file" | sed 's/ /\\/g; s/^/    "/; s/$/"/'
        printf '    "";\nconst size_t %s_len = sizeof(%s) - 1;\n' "$symbol" "$symbol"
    } >>"$out.c.new"
done
printf '\n#endif\n' >>"$out.h.new"
mv "$out.h.new" "$out.h"
mv "$out.c.new" "$out.c"
