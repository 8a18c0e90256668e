#!/usr/bin/env bash
# Two engines, four, one, under load: those that come are used, those that go finish what they have.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scale_to 2
begin_load
scale_to 4
acted "four engines are ready"
sleep "$SETTLE"
scale_to 1
acted "one engine is left"
end_load
