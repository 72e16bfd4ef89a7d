#!/bin/sh
# Make sure that a Chromium for the browser tests is there; install Debian's package where that is possible.
set -u
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
fi
if ! command -v chromium >/dev/null 2>&1; then
    echo "No Chromium was found and none could be installed: the browser tests will fail." >&2
    echo "Install it (Debian: apt-get install chromium), then run again." >&2
fi
exit 0
