# SPDX-License-Identifier: Apache-2.0
"""The rules of the gateway (see `proxy.py`) for nginx."""

from __future__ import annotations

from pathlib import Path

_RULES = """\
# Written by `fedrec deploy init`. Nodes can reach /v1/fleet/...; nothing else is reachable.
worker_processes 1;
daemon off;
pid {scratch}/nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 8192;
# Two for each node that waits for a message.
events {{ worker_connections 8192; }}
http {{
  access_log off;
  server_tokens off;
  client_max_body_size 32m;
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  keepalive_timeout 75s;
  merge_slashes off;
  log_format refused '$time_iso8601 refused $request_method $request_uri from $remote_addr';
  map $status $was_refused {{ 404 1; default 0; }}
  access_log /dev/stderr refused if=$was_refused;
  upstream superlink {{ server {upstream}; keepalive 64; }}
  server {{
    listen {listen} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;
    # The path as sent in the request: no dots, no escapes, nothing after it.
    set $route closed;
    if ($request_uri ~ "^/v1/fleet/[a-z]+(-[a-z]+)*$") {{ set $route open; }}
    if ($request_method != POST) {{ set $route closed; }}
    location = /health {{ return 200; }}
    location / {{
      if ($route = closed) {{ return 404; }}
      proxy_pass https://superlink;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host {name};
      proxy_ssl_verify on;
      proxy_ssl_verify_depth 1;
      proxy_ssl_name {name};
      proxy_ssl_server_name on;
      proxy_ssl_trusted_certificate {authority};
      proxy_read_timeout 60s;
      # Messages are not buffered on disk.
      proxy_request_buffering off;
      proxy_buffering off;
      # Flower's nodes try again after 503, and after no other answer.
      proxy_intercept_errors on;
      error_page 502 504 =503 @away;
    }}
    location @away {{ return 503; }}
  }}
}}
"""


def rules(
    *,
    listen: str,
    upstream: str,
    name: str,
    certificate: Path,
    key: Path,
    authority: Path,
    scratch: Path,
) -> str:
    """An `nginx.conf`.

    Args:
        listen: address and port to listen on.
        upstream: HOST:PORT of the SuperLink.
        name: the name in the SuperLink's certificate.
        certificate: of the gateway.
        key: its private key.
        authority: certificate of the authority that signed the SuperLink's.
        scratch: folder that nginx may write to.
    """
    return _RULES.format(
        listen=listen,
        upstream=upstream,
        name=name,
        certificate=certificate,
        key=key,
        authority=authority,
        scratch=scratch,
    )
