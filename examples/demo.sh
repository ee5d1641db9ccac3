#!/usr/bin/env bash
# What ./dev demo shows: a line for each of the five documents, a map of one head, and the pages.
#
#   examples/demo.sh PROGRAMS PAGES     the folder of the built examples, and the folder for the pages
#
# A document's own code is timed where there is a Python ($PYTHON, .venv's or python3) that has what it needs.
set -euo pipefail
programs=$(realpath "$1") pages=$2
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
else
  bold='' dim='' plain=''
fi

titles=(
  [0]="a NumPy function"
  [1]="a PyTorch layer"
  [2]="three functions, checked by hand"
  [3]="a NumPy class with valid_lens"
  [4]="a Flax module, weights returned"
)
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}

# shown MS: three digits and a unit
shown() {
  LC_ALL=C awk -v ms="$1" 'BEGIN {
    if (ms == "") print "-"; else if (ms >= 1000) printf "%.3g s", ms / 1000
    else if (ms >= 100) printf "%.0f ms", ms; else if (ms >= 1) printf "%.3g ms", ms; else printf "%.3g us", 1000 * ms }'
}

# Times of the document's own code, "small<tab>large", or nothing where it cannot run.
own_times() { "$python" -W ignore "examples/python/documents.py" "00$1" 2>/dev/null || true; }

printf '%sFive write-ups of multi-head attention, done over with Headway%s\n\n' "$bold" "$plain"
printf '%s%-38s %-12s %-15s %18s %22s%s\n' "$dim" "" "" "" "its example" "1024 tokens, d 512" "$plain"
printf '%s%-38s %-12s %-15s %9s %8s %9s %12s%s\n' "$dim" "document" "its result" "as it says" "Headway" "its code" "Headway" "its code" "$plain"
wrong=()
for number in 0 1 2 3 4; do
  if line=$("$programs/example_00$number" --line); then answer=yes; else answer=NO wrong+=("00$number"); fi
  IFS=$'\t' read -r shape small large error <<<"$line"
  IFS=$'\t' read -r own_small own_large <<<"$(own_times $number)" || true
  printf '00%d  %-33s %-12s %-15s %9s %8s %9s %12s\n' $number "${titles[$number]}" "$shape" "$answer, to $error" \
    "$(shown "$small")" "$(shown "$own_small")" "$(shown "$large")" "$(shown "$own_large")"
done
if [[ ${#wrong[@]} != 0 ]]; then
  echo "not as the document says: ${wrong[*]}; run $programs/example_${wrong[0]} to see where" >&2
  exit 1
fi
printf '\n'
"$programs/example_sentence" examples/data "$pages"
