'use strict';
// Who wrote what: shows a method's text token by token.

const ORIGINS = {
  accepted: 'drafted and kept',
  correction: "the target's, in place of a rejected draft token",
  bonus: "the target's, after a draft that was kept whole",
  plain: "the target's, when nothing was drafted",
};
const STEPS = {ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity};

for (const view of document.querySelectorAll('.written')) {
  const prompts = JSON.parse(view.querySelector('script').textContent);
  const select = view.querySelector('select');
  const buttons = view.querySelector('.methods');
  const text = view.querySelector('.text');
  const detail = view.querySelector('.detail');
  const back = view.querySelector('.back');
  const {id} = view.querySelector('h4');
  const rows = [...document.querySelectorAll(`a[href="#${id}"]`)];
  const methods = Object.keys(prompts[0].methods);
  // A method that drafts has more to show.
  let chosen = methods.find((name) => drafts(prompts[0].methods[name]));
  chosen ??= methods[0];
  let tokens = [];
  let current = -1;

  prompts.forEach((prompt, i) => {
    const words = prompt.text.slice(0, 60).replace(/\s+/g, ' ');
    select.add(new Option(`${prompt.category}: ${words}`, i));
  });
  for (const name of methods) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = name;
    button.addEventListener('click', () => choose(name));
    buttons.append(button);
  }
  for (const row of rows) {
    row.addEventListener('click', () => {
      const {method, category} = row.dataset;
      if (category !== undefined) {
        select.selectedIndex =
          prompts.findIndex((prompt) => prompt.category === category);
      }
      choose(method ?? chosen);
    });
  }
  select.addEventListener('change', show);
  for (const name of ['mouseover', 'click']) {
    text.addEventListener(name, (event) => mark(tokens.indexOf(event.target)));
  }
  text.addEventListener('mouseleave', () => mark(-1));
  text.addEventListener('keydown', (event) => {
    if (event.key in STEPS && tokens.length) {
      event.preventDefault();
      const next = current + STEPS[event.key];
      mark(Math.min(Math.max(next, 0), tokens.length - 1));
    }
  });
  show();

  function choose(name) {
    chosen = name;
    show();
  }

  function show() {
    const prompt = prompts[select.selectedIndex];
    const {pieces, origins, rounds, probs} = prompt.methods[chosen];
    for (const button of buttons.children) {
      button.setAttribute('aria-pressed', button.textContent === chosen);
    }
    view.querySelector('.prompt').textContent = prompt.text;
    text.replaceChildren();
    tokens = pieces.map((piece, i) => {
      if (i === 0 || rounds[i] !== rounds[i - 1]) {
        text.append(element('tick', i === 0 ? '' : '\u200b|'));
      }
      const token = element(`token ${origins[i]}`, shown(piece));
      token.title = `round ${rounds[i] + 1}: ${ORIGINS[origins[i]]}`;
      if (i in probs) {
        token.title += `; probability ${probs[i]} under the target`;
      }
      token.dataset.round = rounds[i];
      text.append(token);
      return token;
    });
    mark(-1);
    const kept = origins.filter((origin) => origin === 'accepted').length;
    const count = rounds.length ? rounds[rounds.length - 1] + 1 : 0;
    view.querySelector('.count').textContent =
      `${chosen}: ${pieces.length} tokens in ${count} rounds, ` +
      `${kept} of them drafted`;
    const row = rows.find((link) => link.dataset.method === chosen);
    back.hidden = row === undefined;
    if (row) back.href = `#${row.closest('tr').id}`;
  }

  // Marks a token and its round, and says what is known about it.
  function mark(index) {
    current = index;
    const token = tokens[index];
    for (const other of tokens) {
      other.classList.toggle(
        'same-round', other.dataset.round === token?.dataset.round);
      other.classList.toggle('current', other === token);
    }
    if (token) {
      detail.textContent =
        `token ${index + 1}, ${JSON.stringify(token.textContent)}, ` +
        token.title;
    }
  }
}

function drafts(written) {
  return written.origins.includes('accepted');
}

// A token without text of its own is part of a character, or ends the text.
function shown(piece) {
  return piece === '' ? '\u00b7' : piece.replace(/\n/g, '\u23ce\n');
}

function element(name, content) {
  const made = document.createElement('span');
  made.className = name;
  made.textContent = content;
  return made;
}
