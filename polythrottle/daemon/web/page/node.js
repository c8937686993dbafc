// All services of a server, asked for once a second; each one's own page is below /services/NAME/.
const TOKEN = 'polythrottle-token';
const find = (id) => document.getElementById(id);
const watts = (value) => (value === null ? '–' : value >= 1000 ? `${(value / 1000).toFixed(2)} kW` : `${value.toFixed(0)} W`);
const millis = (value) => (value === null ? '–' : `${(value * 1000).toPrecision(3)} ms`);
const given = new URLSearchParams(location.hash.slice(1)).get('token');
if (given) { sessionStorage.setItem(TOKEN, given); history.replaceState(null, '', location.pathname); }
function row(each) {
  const line = document.createElement('tr');
  const name = document.createElement('th');
  name.scope = 'row';
  const link = document.createElement('a');
  link.href = `/services/${encodeURIComponent(each.name)}/`;
  link.textContent = each.name;
  name.append(link);
  line.append(name);
  const p99 = each.limit_s === null ? millis(each.p99_s) : `${millis(each.p99_s)} of ${millis(each.limit_s)}`;
  const cells = [
    each.short ? `${each.phase}, short of watts` : each.phase,
    each.rate_per_s === null ? '–' : `${each.rate_per_s.toPrecision(3)}/s`,
    p99, watts(each.power_w), each.share_w === null ? 'not bounded' : watts(each.share_w), String(each.weight),
  ];
  for (const text of cells) { const cell = document.createElement('td'); cell.textContent = text; line.append(cell); }
  return line;
}
function kept(node) {
  if (node.services.length === 0) return 'nothing is steered: there is no service now';
  if (node.met === null) return 'not known whether it is kept';
  return node.met ? 'kept' : 'cannot be promised';
}
function show(node) {
  find('title').textContent = `A server of ${node.services.length} services`;
  const kind = node.energy_kind === 'measured' ? '' : node.energy_kind;
  find('at').textContent = [node.at.slice(11, 19), kind].filter(Boolean).join(' · ');
  find('power').textContent = watts(node.power_w ?? node.boards_w);
  find('power-note').textContent = node.power_w === null ? 'the devices of its services alone' : `of it ${watts(node.boards_w)} its services’ devices`;
  find('limit').textContent = node.limit_w === null ? 'no limit' : watts(node.limit_w);
  find('limit-note').textContent = node.limit_w === null ? '' : `${kept(node)}; above it ${node.above} s since it was set, at most ${node.above_most} s in a row`;
  find('buys').textContent = node.buys_w === null ? '–' : watts(node.buys_w);
  find('buys-note').textContent = node.buys;
  find('services').replaceChildren(...node.services.map(row));
  const faults = [...node.faults, ...node.services.flatMap((each) => each.faults.map((words) => `${each.name}: ${words}`))];
  find('notices').replaceChildren(...faults.map((words) => { const line = document.createElement('p'); line.className = 'notice bad'; line.textContent = words; return line; }));
}
function lost(words) {
  const line = document.createElement('p');
  line.className = 'notice bad';
  line.textContent = words;
  find('notices').replaceChildren(line);
}
async function turn() {
  const token = sessionStorage.getItem(TOKEN);
  try {
    const answer = await fetch('/v1/node', { cache: 'no-store', headers: token ? { Authorization: `Bearer ${token}` } : {} });
    find('login').hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else if (answer.status !== 401) lost(`the daemon answers ${answer.status}`);
  } catch { lost('The daemon does not answer; it is asked again.'); }
  setTimeout(turn, 1000);
}
find('login').addEventListener('submit', (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, find('token').value.trim());
  find('token').value = '';
});
turn();
