"""The page `/login`: plain HTML, for sockets are closed to those without a login. A token is sent once, never kept."""

from __future__ import annotations

from string import Template

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from twinstep.platform.dashboard.theme import EARLY_SCRIPT, LOGO, style_sheet

PATH = "/login"  # where the gate sends whoever it does not know
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · Twinstep</title><style>$css</style></head>
<body><script>$early</script>
<main class="tw-login"><form class="tw-card tw-login-card" id="form">
<div class="tw-brand">$logo<div>Twinstep</div></div>
<h1 class="tw-h1">Log in</h1>
<label class="tw-dim tw-small" for="token">Your token</label>
<input class="tw-search" id="token" type="password" autocomplete="current-password" required autofocus
 placeholder="tsp_…" spellcheck="false">
<p class="tw-login-error" id="error" role="alert"></p>
<button class="tw-btn tw-btn-main" type="submit">Log in</button>
<p class="tw-dim tw-small">An admin makes one: <code>twinstep token create USER</code>. It stays on the server as a
hash, and in this browser as a cookie that scripts cannot read.</p>
</form></main>
<script>
  const form = document.getElementById('form'), error = document.getElementById('error');
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    error.textContent = '';
    try {
      const answer = await fetch('/v1/session', {method: 'POST', headers: {'Content-Type': 'application/json'},
        body: JSON.stringify({token: document.getElementById('token').value.trim()})});
      if (answer.ok) {
        const next = new URLSearchParams(location.search).get('next') || '/';
        const target = new URL(next, location.origin);
        location.assign(target.origin === location.origin ? target.pathname + target.search : '/');
        return;
      }
      const problem = await answer.json().catch(() => ({}));
      error.textContent = problem.detail || `The control plane answered $${answer.status}.`;
    } catch {
      error.textContent = 'The control plane does not answer.';
    }
    document.getElementById('token').select();
  });
</script></body></html>
""")


async def answer(request: Request) -> Response:
    """Answer with the page. It holds nothing of the request: where to go on is read, and checked, in the browser."""
    return HTMLResponse(
        _PAGE.substitute(css=style_sheet(), logo=LOGO, early=EARLY_SCRIPT), headers={"Cache-Control": "no-store"}
    )
