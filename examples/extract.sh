#!/usr/bin/env bash
# The three ways to send a request, by curl: bash examples/extract.sh [--url http://127.0.0.1:8000]
set -euo pipefail
url=${LAYERTAP_URL:-http://127.0.0.1:8000}
case "$#:${1-}" in
0:) ;;
2:--url) url=$2 ;;
*) echo "usage: extract.sh [--url URL]" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")"

post() { curl --silent --show-error --fail-with-body "$@"; echo; }

echo "# The body is one picture, the rest is in the query: ten scores, and a raw activation pooled to 16 means"
post "$url/extract?layers=head,block1&pool=mean" --header 'Content-Type: image/png' --data-binary @digit.png

echo "# Multipart: two pictures, and what is asked of them as JSON; layers may differ in what is done to them"
post "$url/extract" \
    --form-string 'request={"layers": ["head", {"layer": "pool", "pool": "flatten", "channels": [0, 1, 2, 3], "as": "few"}]}' \
    --form images=@digit.png --form images=@digit-0.png

echo "# JSON with the picture in base64, and the vector in base64 too: little-endian float32, exact and short"
picture=$(base64 <digit.png | tr -d '\n')
post "$url/extract" --header 'Content-Type: application/json' --data-binary @- <<JSON
{"inputs": [{"image": "$picture"}],
 "layers": ["pool"], "pool": "flatten", "normalize": true, "encoding": "base64"}
JSON
