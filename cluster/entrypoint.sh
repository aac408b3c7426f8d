#!/bin/sh
# Puts the lines of serve.env into the environment, except those that are set already, and becomes the command.
#
# `serve` alone is what SageMaker and the image pytorch/torchserve are started with: the model of the platform, or a
# server of /home/model-server/config.properties. So is the image's own command where a platform's variable is set that
# starts containers without an argument. As in that image, other arguments are evaluated by a shell;
# those of `sh -c` and `python -c` stay as they are. torchserve stays in the foreground, or the container would end
# as soon as the server has started.
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

home=${MODEL_SERVER_HOME:-/home/model-server}
if [ -z "${TEMP-}" ] && [ -w "$home/tmp" ]; then
  export TEMP="$home/tmp"
fi
default='torchrelay start --foreground /opt/torchrelay/configs/container.yaml'
platform=${AIP_HTTP_PORT-}${AZUREML_ENTRY_SCRIPT-}${AZUREML_MODEL_DIR-}${HF_MODEL_DIR-}${HF_MODEL_ID-}
if [ "$*" = "$default" ] && [ -n "$platform" ]; then
  set -- serve
fi
if [ "$*" = serve ]; then
  set -- torchserve --start --container
fi

# tini reaps what Ray's processes leave. SageMaker's documentation forbids it as an image's entry point.
init=
if [ $$ -eq 1 ] && command -v tini >/dev/null; then
  init='tini --'
fi
torchserve() {
  exec $init torchserve "$@" --foreground
}
case ${2-} in
  -c | -?c | -??c) exec $init "$@" ;;
esac
case "$*" in
  torchserve | 'torchserve '* | *[\;\&\|]*) eval "$*" ;; # the function above
  *) eval "exec $init $*" ;;
esac
