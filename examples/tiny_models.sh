#!/usr/bin/env bash
# One request to each of the models in the models.yaml that tiny_models.py writes.
set -euo pipefail
url=${LAYERTAP_URL:-http://127.0.0.1:8000}
folder=${1:-out/tiny}

post() { # PATH, a JSON body
    curl -sS --fail-with-body "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

# A query and documents, the best one first.
post /rerank '{"query": "who saw the dog?", "documents": ["a mat", "a cat saw the dog", "dogs"], "top_n": 2}'
# The words of a text and their weights.
post /extract '{"model": "splade", "encoding": "sparse", "inputs": [{"text": "who saw the dog?"}]}'
# A vector for each token.
post /extract '{"model": "colbert", "prompt": "document", "inputs": [{"text": "a cat saw the dog"}]}'
# A layer's mean over the time of a sound.
curl -sS --fail-with-body "$url/extract?model=wave&layers=encoder.layers.1&pool=mean" \
    -H 'Content-Type: audio/wav' --data-binary @"$folder/tone.wav"
echo
