#!/usr/bin/env bash
# Build an image of this project where there is no container engine, on a Debian base made here, and try it: /readyz and
# one extraction. As root, with debootstrap and buildah from Debian:
#
#     deploy/images/build.sh [FOLDER [TARGET [BUILD-ARG=VALUE…]]]
#
# FOLDER (default: a new one below /tmp) takes some 25 GB and is removed at the end, unless it was named. TARGET is a
# stage of the Dockerfile. A certificate store that this machine has in place of its own is used while building.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

named=${1:-}
folder=${named:-$(mktemp -d)}
target=${2:-}
certificates=/etc/ssl/certs/ca-certificates.crt
mkdir -p "$folder"
buildah() { command buildah --root="$folder/store" --runroot="$folder/run" --storage-driver=overlay "$@"; }
finish() {
    buildah rm --all >/dev/null 2>&1 || true
    [[ -n $named ]] || rm -rf "$folder"
}
trap finish EXIT

if [[ ! -e $folder/base.done ]]; then
    debootstrap --variant=minbase bookworm "$folder/base"
    chroot "$folder/base" sh -c 'apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends python3 python3-venv ca-certificates &&
        apt-get clean && rm -rf /var/lib/apt/lists/*'
    touch "$folder/base.done"
fi
if ! buildah inspect --type=image localhost/python-base >/dev/null 2>&1; then
    base=$(buildah from scratch)
    buildah copy --quiet "$base" "$folder/base" / >/dev/null
    buildah commit --quiet --rm "$base" localhost/python-base >/dev/null
fi

arguments=(--build-arg=PYTHON_IMAGE=localhost/python-base)
for each in "${@:3}"; do arguments+=("--build-arg=$each"); done
[[ -z $target ]] || arguments+=("--target=$target")
buildah build --isolation=chroot --format=docker --layers "${arguments[@]}" \
    --volume="$certificates:$certificates:ro" --tag=localhost/layertap .
buildah images --filter=reference=localhost/layertap --format='{{.Name}} {{.Size}}'

# The image's own command, as its own user; a chroot has this machine's network.
container=$(buildah from localhost/layertap)
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
log=$folder/log
buildah run --isolation=chroot --env="LAYERTAP_PORT=$port" --env=LAYERTAP_API_KEYS=try --env=LAYERTAP_DRAIN_DELAY_S=0 \
    "$container" -- layertap serve --host 127.0.0.1 2>"$log" &
running=$!
url=http://127.0.0.1:$port
for _ in {1..120}; do
    curl -fsS "$url/readyz" 2>/dev/null && break
    kill -0 $running || { tail -n 5 "$log" >&2; exit 1; }
    sleep 1
done
echo
curl -fsS "$url/extract?layers=block3&pool=mean&format=json" -H 'X-API-Key: try' -H 'Content-Type: image/png' \
    --data-binary @examples/digit.png | head -c 300
echo
server=$(grep -om1 'Started server process \[[0-9]*' "$log" | grep -o '[0-9]*$')
ps -o user=,pid=,rss=,args= -p "$server"
kill -TERM "$server"
wait $running && echo 'ended with status 0'
