'use strict';
// Who wrote what: shows a method's text token by token.

const ORIGINS = {
  accepted: 'drafted and kept',
  correction: "the target's, in place of a rejected draft token",
  bonus: "the target's, after a draft that was kept whole",
  plain: "the target's, when nothing was drafted",
};

for (const view of document.querySelectorAll('.written')) {
  const prompts = JSON.parse(view.querySelector('script').textContent);
  const select = view.querySelector('select');
  const buttons = view.querySelector('.methods');
  const text = view.querySelector('.text');
  const methods = Object.keys(prompts[0].methods);
  // Of the first method that drafts there is more to see.
  let chosen = methods.find((name) => drafts(prompts[0].methods[name]));
  chosen ??= methods[0];

  prompts.forEach((prompt, i) => {
    const words = prompt.text.slice(0, 60).replace(/\s+/g, ' ');
    select.add(new Option(`${prompt.category}: ${words}`, i));
  });
  for (const name of methods) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = name;
    button.addEventListener('click', () => {
      chosen = name;
      show();
    });
    buttons.append(button);
  }
  select.addEventListener('change', show);
  text.addEventListener('mouseover', (event) => mark(event.target));
  text.addEventListener('mouseleave', () => mark(text));
  show();

  function show() {
    const prompt = prompts[select.selectedIndex];
    const {pieces, origins, rounds} = prompt.methods[chosen];
    for (const button of buttons.children) {
      button.setAttribute('aria-pressed', button.textContent === chosen);
    }
    view.querySelector('.prompt').textContent = prompt.text;
    text.replaceChildren();
    pieces.forEach((piece, i) => {
      if (i === 0 || rounds[i] !== rounds[i - 1]) {
        text.append(element('tick', i === 0 ? '' : '\u200b|'));
      }
      const token = element(`token ${origins[i]}`, shown(piece));
      token.title = `round ${rounds[i] + 1}: ${ORIGINS[origins[i]]}`;
      token.dataset.round = rounds[i];
      text.append(token);
    });
    const kept = origins.filter((origin) => origin === 'accepted').length;
    const count = rounds.length ? rounds[rounds.length - 1] + 1 : 0;
    view.querySelector('.count').textContent =
      `${chosen}: ${pieces.length} tokens in ${count} rounds, ` +
      `${kept} of them drafted`;
  }

  function mark(target) {
    for (const token of text.children) {
      token.classList.toggle(
        'same-round',
        target.dataset.round !== undefined &&
          token.dataset.round === target.dataset.round);
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
