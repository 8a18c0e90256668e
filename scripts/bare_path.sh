#!/usr/bin/env bash
# Links the programs of a minimal Debian or Ubuntu, make and Python into FOLDER, a PATH without all other programs: bare_path.sh FOLDER
set -euo pipefail
required=$(dpkg-query --show --showformat '${Package} ${Essential} ${Priority}\n' | sed -n 's/ \(yes .*\|no required\)$//p')
for name in $(dpkg --listfiles $required | sed -n 's:^\(/usr\)\?/s\?bin/::p') awk make; do
  if path=$(type -P "$name"); then ln -sf "$path" "${1:?}"; fi
done
ln -sf "$(python3 -c 'import sys; print(sys.executable)')" "$1/python3"
