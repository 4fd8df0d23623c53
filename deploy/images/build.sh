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

folder=${1:-$(mktemp -d)}
target=${2:-}
store=("--root=$folder/store" "--runroot=$folder/run")
storage=("${store[@]}" --storage-driver=overlay)
certificates=/etc/ssl/certs/ca-certificates.crt
mkdir -p "$folder"
[[ -n ${1:-} ]] || trap 'buildah "${storage[@]}" rm --all >/dev/null 2>&1; rm -rf "$folder"' EXIT

if [[ ! -e $folder/base.done ]]; then
    debootstrap --variant=minbase bookworm "$folder/base"
    chroot "$folder/base" sh -c 'apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends python3 python3-venv ca-certificates &&
        apt-get clean && rm -rf /var/lib/apt/lists/*'
    touch "$folder/base.done"
fi
base=$(buildah "${storage[@]}" from scratch)
buildah "${storage[@]}" copy --quiet "$base" "$folder/base" / >/dev/null
buildah "${storage[@]}" commit --quiet --rm "$base" localhost/python-base >/dev/null

arguments=(--build-arg=PYTHON_IMAGE=localhost/python-base)
for each in "${@:3}"; do arguments+=("--build-arg=$each"); done
[[ -z $target ]] || arguments+=("--target=$target")
buildah "${storage[@]}" build --isolation=chroot --format=docker --layers "${arguments[@]}" \
    --volume="$certificates:$certificates:ro" --tag=localhost/layertap .
buildah "${storage[@]}" images
echo "image: $(buildah "${storage[@]}" inspect --type=image --format '{{.FromImageID}}' localhost/layertap)"
