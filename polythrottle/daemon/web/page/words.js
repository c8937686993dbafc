// How figures are written: SI in, what people read out; what is unknown is a dash, never a zero.
const NONE = '–';
const known = (value) => typeof value === 'number' && Number.isFinite(value);
const round = (value, digits = 3) => {
  if (value === 0) return '0';
  const places = Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  const text = value.toFixed(places);
  return places > 0 ? text.replace(/\.?0+$/, '') : text;
};
const minus = (text) => text.replace('-', '−');
const fixed = (value, digits = 3) => {  // keeps its zeros, so that a figure that changes each second does not dance
  if (!known(value)) return NONE;
  if (value === 0) return '0';
  return minus(value.toFixed(Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(Math.abs(value)))))));
};
const seconds = (value) => {
  if (!known(value)) return NONE;
  return Math.abs(value) < 1 ? `${fixed(value * 1e3)} ms` : `${fixed(value)} s`;
};
const prefixed = (value, unit) => {
  if (!known(value)) return NONE;
  for (const [factor, prefix] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, ''], [1e-3, 'm'], [1e-6, 'µ']]) {
    if (Math.abs(value) >= factor * 0.9995) return `${fixed(value / factor)} ${prefix}${unit}`;
  }
  return `${value === 0 ? '0' : value.toExponential(2)} ${unit}`;
};
// Relative energy has no unit: only ratios of it mean something.
let relative = false;
const watts = (value) => (known(value) ? `${fixed(value)} ${relative ? 'rel.' : 'W'}` : NONE);
const joules = (value) => (relative ? (known(value) ? `${fixed(value)} rel.` : NONE) : prefixed(value, 'J'));
const between = (low, high) => {  // the unit once, where both have the same
  const [from, to] = [joules(low), joules(high)];
  return from.split(' ')[1] === to.split(' ')[1] ? `${from.split(' ')[0]} to ${to}` : `${from} to ${to}`;
};
const rate = (value) => (known(value) ? `${fixed(value)}/s` : NONE);
const degrees = (value) => (known(value) ? `${value.toFixed(1)} °C` : NONE);
// A knob as in files and on the command line: its name ends in the unit.
const knobName = (name) => name.replace(/_hz$/, '_mhz').replace(/_s$/, '_us');
const megahertz = (value) => (known(value) ? `${Math.round(value / 1e4) / 100} MHz` : NONE);
const level = (name, value) => {
  if (typeof value !== 'number') return String(value ?? NONE);
  if (name.endsWith('_hz')) return String(Math.round(value) / 1e6);
  return name.endsWith('_s') ? String(Math.round(value * 1e6)) : round(value, 6);
};
const point = (levels) => Object.entries(levels ?? {}).map(([name, value]) => `${knobName(name)}=${level(name, value)}`).join(', ');
const span = (value) => {
  const whole = Math.max(0, Math.round(value));
  if (whole < 120) return `${whole} s`;
  return whole < 7200 ? `${Math.round(whole / 60)} min` : `${Math.round(whole / 3600)} h`;
};
const clockTime = (when) => {
  const date = new Date(when);
  return Number.isNaN(date.getTime()) ? String(when) : date.toTimeString().slice(0, 8);
};
const dayTime = (when) => {
  const date = new Date(when);
  if (Number.isNaN(date.getTime())) return String(when);
  const pad = (number) => String(number).padStart(2, '0');
  return `${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clockTime(date)}`;
};

// The document: nothing a daemon says is ever taken for markup.
const at = (id) => document.getElementById(id);
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const tell = (id, text) => put(at(id), text);
const hide = (id, hidden) => { if (at(id).hidden !== hidden) at(id).hidden = hidden; };
const classed = (node, names) => { if (node.getAttribute('class') !== names) node.setAttribute('class', names); };
const made = (name, attributes = {}, text = '') => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
};
// Rows are kept and their cells rewritten, so that a day of updates makes no nodes.
const rows = (body, cells, headed = true) => {
  while (body.rows.length > cells.length) body.deleteRow(-1);
  cells.forEach((texts, index) => {
    const row = body.rows[index] ?? body.insertRow();
    while (row.cells.length > texts.length) row.deleteCell(-1);
    while (row.cells.length < texts.length) row.append(headed && !row.cells.length ? made('th', { scope: 'row' }) : made('td'));
    texts.forEach((text, column) => put(row.cells[column], text));
  });
};
