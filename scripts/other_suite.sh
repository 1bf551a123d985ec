# Sourced: packages of another Debian suite, for a folder of its own, from where this machine's own
# packages come from. Neither dpkg's state nor the system's lists change, and it needs no root.
# The caller has set WORK, a folder, and `fail`, which prints words and ends.

# apt with the given suite as its only source, in a folder of its own, as if nothing were installed
apt_of() { # SUITE ARGUMENTS...
    local suite=$1 at=$WORK/apt-$1
    shift
    if [ ! -d "$at" ]; then
        mkdir -p "$at"/{lists/partial,cache/archives/partial,sources}
        : >"$at/status"
        own_sources "$suite" "$at/sources"
    fi
    apt-get -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$at/sources" \
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$at/lists" \
        -o Dir::State::status="$at/status" -o Dir::Cache="$at/cache" \
        -o APT::Install-Recommends=false -o APT::Sandbox::User="$(id -un)" \
        -o Debug::NoLocking=1 -qq "$@"
}

own_sources() { # SUITE FOLDER: this machine's source of its distribution, with that suite
    local codename file
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || fail "/etc/os-release names no VERSION_CODENAME"
    # Of the stanzas of all files the first whose suites are the release and its updates: others have names of their
    # own (deadsnakes, docker), or end in -security. Comments may stand before it.
    for file in /etc/apt/sources.list.d/{debian,ubuntu}.sources /etc/apt/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        sed '/^#/d' "$file" | awk -v RS= -v suite="$codename" \
            '$0 ~ "(^|\n)Suites:[^\n]*[ \t]" suite "([ \t]|\n|$)" && $0 !~ /Enabled: *no/ { print; exit }' |
            sed -E "s/^Suites:.*/Suites: $1/; s/^Types:.*/Types: deb deb-src/" >"$2/debian.sources"
        [ ! -s "$2/debian.sources" ] || return 0
    done
    rm -f "$2/debian.sources"
    grep -hE "^deb .*[[:space:]]$codename[[:space:]]" /etc/apt/sources.list /etc/apt/sources.list.d/*.list \
        2>/dev/null | head -1 | sed -E "s/[[:space:]]$codename[[:space:]]/ $1 /; p; s/^deb /deb-src /" \
        >"$2/debian.list" || true
    [ -s "$2/debian.list" ] || fail "no source of $codename in /etc/apt: is this Debian?"
}

# Its packages and those that they need into FOLDER/root
unpack() { # SUITE PACKAGE FOLDER
    apt_of "$1" update && apt_of "$1" -y --download-only install "$2" >/dev/null || return 1
    mkdir -p "$3/root"
    for package in "$WORK/apt-$1"/cache/archives/*.deb; do
        dpkg -x "$package" "$3/root"
    done
}
