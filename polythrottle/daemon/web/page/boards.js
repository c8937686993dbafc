// All boards, renewed a few seconds after each look; what has not changed stays as it is, so that nothing flickers.
const TOKEN = 'polythrottle-token';
const PATIENCE_MS = 10000;
const find = (id) => document.getElementById(id);
const given = new URLSearchParams(location.hash.slice(1)).get('token');
if (given) { sessionStorage.setItem(TOKEN, given); history.replaceState(null, '', location.pathname); }
let seen = Date.now();
function tell(words) {
  if (find('notices').textContent === words) return;
  const line = document.createElement('p');
  line.className = 'notice bad';
  line.textContent = words;
  find('notices').replaceChildren(...(words ? [line] : []));
}
function keyOf(node) { return node.nodeType === 1 ? node.dataset.key ?? node.id : ''; }
// The node that stands for another from now on: the same one where it may be, with what has changed in it.
function renew(old, now) {
  if (!old || old.nodeName !== now.nodeName || keyOf(old) !== keyOf(now)) return document.importNode(now, true);
  if (old.isEqualNode(now)) return old;
  if (old.nodeType !== 1) { old.nodeValue = now.nodeValue; return old; }
  for (const name of old.getAttributeNames()) if (!now.hasAttribute(name)) old.removeAttribute(name);
  for (const name of now.getAttributeNames()) if (old.getAttribute(name) !== now.getAttribute(name)) old.setAttribute(name, now.getAttribute(name));
  const known = new Map([...old.childNodes].filter(keyOf).map((child) => [keyOf(child), child]));
  const children = [...now.childNodes].map((child, place) => renew(keyOf(child) ? known.get(keyOf(child)) : old.childNodes[place], child));
  if (children.length !== old.childNodes.length || children.some((child, place) => child !== old.childNodes[place])) old.replaceChildren(...children);
  return old;
}
function stale() {
  const everyMs = 1000 * Number(find('look').dataset.every);
  const old = Date.now() - seen > 3 * everyMs + PATIENCE_MS;
  document.body.classList.toggle('old', old);
  return old;
}
function came(look) {
  if (look.dataset.at !== find('look').dataset.at) seen = Date.now();
  renew(find('look'), look);
  tell(stale() ? `The boards were last looked at at ${look.dataset.at}: the watcher does not get on.` : '');
}
function ask() {
  // As a document, which this request parses by itself: the policy lets no script make markup of text.
  const asked = new XMLHttpRequest();
  const token = sessionStorage.getItem(TOKEN);
  asked.open('GET', '/boards.html');
  asked.responseType = 'document';
  asked.timeout = PATIENCE_MS;
  if (token) asked.setRequestHeader('Authorization', `Bearer ${token}`);
  asked.onload = () => {
    find('login').hidden = asked.status !== 401;
    const look = asked.response?.getElementById('look');
    if (asked.status === 200 && look) came(look);
    else if (asked.status !== 401) tell(`The page answers ${asked.status}; it is asked again.`);
    else tell(token ? 'That is not the token.' : '');
  };
  asked.onerror = asked.ontimeout = () => { stale(); tell('The watcher does not answer; it is asked again.'); };
  asked.onloadend = () => setTimeout(turn, Math.max(1000, 1000 * Math.min(60, Number(find('look').dataset.every))));
  asked.send();
}
function turn() {
  // Nobody sees a tab that is hidden.
  if (document.hidden) { document.addEventListener('visibilitychange', turn, { once: true }); return; }
  ask();
}
find('login').addEventListener('submit', (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, find('token').value.trim());
  find('token').value = '';
  tell('');
});
turn();
