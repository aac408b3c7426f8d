#!/bin/sh
# Puts the lines of serve.env into the environment, except those that are set already, and becomes the command;
# torchserve stays in the foreground, or the container would end as soon as the server has started.
set -eu
umask 077

file=${TORCHRELAY_ENV:-/opt/torchrelay/configs/serve.env}
number=0
while read -r line || [ -n "$line" ]; do
  number=$((number + 1))
  case $line in '' | '#'*) continue ;; esac
  key=${line%%=*}
  case $key in
    "$line" | '' | [0-9]* | *[!A-Za-z0-9_]*)
      echo "$file, line $number: '$line' is not KEY=VALUE" >&2
      exit 1
      ;;
  esac
  printenv "$key" >/dev/null || export "$line"
done <"$file"

if [ "${1-}" = torchserve ]; then
  set -- "$@" --foreground
fi
exec "$@"
