// The connection: one stream of status and events, taken up again whenever it ends; writes one by one.
const TOKEN = 'polythrottle-token';
const SILENT_S = 15, STALE_S = 5, AGAIN_MOST_S = 10;
// One of several services has its page and its API below /services/NAME; one alone has them at the root.
const BASE = location.pathname.startsWith('/services/') ? location.pathname.replace(/\/+$/, '') : '';
class Refusal extends Error {
  constructor(code, words) { super(words); this.code = code; }
}
class Feed {
  constructor({ status, event, began, changed }) {
    Object.assign(this, { heard: { status, event, began, changed }, last: 0, live: false, asked: false, words: '', lostAt: null });
    this.wake = () => {};
    this.taken();
    addEventListener('hashchange', () => { if (this.taken()) this.wake(); });
  }
  // The token comes behind the #, which is sent to nobody; it leaves the address bar and stays with this tab.
  taken() {
    const given = new URLSearchParams(location.hash.slice(1)).get('token');
    if (given) { sessionStorage.setItem(TOKEN, given); history.replaceState(null, '', location.pathname); }
    return Boolean(given);
  }
  headers(more = {}) {
    const token = sessionStorage.getItem(TOKEN);
    return token ? { ...more, Authorization: `Bearer ${token}` } : more;
  }
  async ask(method, path, body) {
    const headers = this.headers(body === undefined ? {} : { 'Content-Type': 'application/json' });
    const answer = await fetch(`${BASE}${path}`, { method, headers, cache: 'no-store', body: body === undefined ? undefined : JSON.stringify(body) });
    await this.check(answer);
    return answer.json();
  }
  async check(answer) {
    if (answer.ok) return;
    const { error } = await answer.json().catch(() => ({}));
    throw new Refusal(answer.status, error?.words ?? `the daemon answers ${answer.status}`);
  }
  async follow() {
    for (let failures = 0; ; failures += 1) {
      try {
        await this.heard.began();
        await this.stream(() => { failures = 0; this.change(true); });
      } catch (error) {
        this.asked = error.code === 401;
        this.words = error instanceof Refusal ? error.message : '';
      }
      this.change(false);
      const wait_s = this.asked ? 3600 : Math.min(AGAIN_MOST_S, 0.5 * 2 ** failures);
      await new Promise((done) => { this.wake = done; setTimeout(done, wait_s * 1e3); });
    }
  }
  change(live) {
    if (this.live && !live) this.lostAt = new Date();
    if (live) Object.assign(this, { lostAt: null, asked: false, words: '' });
    this.live = live;
    this.heard.changed();
  }
  login(token) {
    sessionStorage.setItem(TOKEN, token);
    this.wake();
  }
  async stream(opened) {
    const stop = new AbortController();
    let watch = 0;
    const alive = () => { clearTimeout(watch); watch = setTimeout(() => stop.abort(), SILENT_S * 1e3); };
    alive();
    try {
      const headers = this.headers({ Accept: 'text/event-stream', 'Last-Event-ID': String(this.last) });
      const answer = await fetch(`${BASE}/v1/events?after=${this.last}`, { headers, cache: 'no-store', signal: stop.signal });
      await this.check(answer);
      opened();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ''; ;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        const parts = (rest + value).replaceAll('\r\n', '\n').split('\n\n');
        rest = parts.pop();
        for (const part of parts) this.told(part);
      }
    } finally {
      clearTimeout(watch);
      stop.abort();
    }
  }
  told(part) {
    let kind = 'message', data = '';
    for (const line of part.split('\n')) {
      const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
      if (name === 'event') kind = value;
      if (name === 'data') data += value;
    }
    if (kind === 'status') this.heard.status(JSON.parse(data));
    if (kind === 'event') this.heard.event(JSON.parse(data));
  }
}
