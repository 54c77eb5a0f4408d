#!/bin/sh
# The programs that tests take from the system: Prometheus with promtool, Chromium and nginx. For Debian and Ubuntu.
set -eu

# Debian's kubectl is too old for components, and Ubuntu has none: it has its own installation.
command -v kubectl >/dev/null ||
    echo "setup-system: kubectl is missing, and with it tests/test_kubernetes.py: see kubernetes.io/docs/tasks/tools" >&2

missing=
PATH=$PATH:/usr/sbin # Debian's place of nginx, which is not in everybody's path
for program in prometheus promtool chromium nginx; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "setup-system: got a system without apt-get; install with its own package manager:$missing" >&2
    exit 1
fi

as_root=
[ "$(id -u)" = 0 ] || as_root=sudo

# Programs are wanted, not services: while this file stands, a package starts nothing.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '$as_root rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
fi
echo "setup-system: installing$missing"
$as_root apt-get -qq update
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends prometheus chromium nginx-light
if command -v systemctl >/dev/null; then
    $as_root systemctl --quiet disable prometheus.service nginx.service || true # nor at the next start of the machine
fi
