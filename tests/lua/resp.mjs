// resp.mjs - the smallest Redis client that the tests need: RESP2, pipelined, no dependency.
//
// Every call is written at once; replies come in order, so many calls may be in flight. An error
// reply rejects with RedisError and leaves the connection usable; a connection that ends, or owes a reply
// for a minute, rejects all that is in flight and all that comes. Strings are latin1: bytes survive.
import net from 'node:net';

export class RedisError extends Error {}

export class Redis {
    #waiting = []; // {resolve, reject} of the calls in flight, oldest first
    #buffer = '';
    #at = 0; // first byte of #buffer that is not parsed yet
    #ended = null; // the error that ended the connection

    constructor(socketPath) {
        this.socket = net.connect(socketPath);
        this.socket.setEncoding('latin1');
        this.socket.on('data', (chunk) => this.#receive(chunk));
        this.socket.on('error', (error) => this.#fail(error));
        this.socket.on('close', () => this.#fail(new Error('connection closed')));
        this.socket.setTimeout(60000, () => {
            if (this.#waiting.length > 0) this.socket.destroy(new Error('no reply for a minute'));
        });
    }

    call(...args) {
        if (this.#ended) return Promise.reject(this.#ended);
        let out = `*${args.length}\r\n`;
        for (const arg of args.map(String)) out += `$${arg.length}\r\n${arg}\r\n`;
        this.socket.write(out, 'latin1');
        return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
    }

    close() {
        this.socket.destroy();
    }

    #fail(error) {
        this.#ended ??= error;
        for (const { reject } of this.#waiting.splice(0)) reject(error);
    }

    #receive(chunk) {
        this.#buffer = this.#buffer.slice(this.#at) + chunk;
        this.#at = 0;
        for (;;) {
            const start = this.#at;
            const reply = this.#parse();
            if (reply === undefined) {
                this.#at = start; // incomplete: again when more has come
                return;
            }
            const { resolve, reject } = this.#waiting.shift();
            if (reply instanceof RedisError) reject(reply);
            else resolve(reply);
        }
    }

    #parse() {
        const eol = this.#buffer.indexOf('\r\n', this.#at);
        if (eol < 0) return undefined;
        const type = this.#buffer[this.#at];
        const line = this.#buffer.slice(this.#at + 1, eol);
        this.#at = eol + 2;
        if (type === '+') return line;
        if (type === '-') return new RedisError(line);
        if (type === ':') return Number(line);
        if (Number(line) < 0) return null;
        if (type === '$') {
            const end = this.#at + Number(line);
            if (this.#buffer.length < end + 2) return undefined;
            this.#at = end + 2;
            return this.#buffer.slice(end - Number(line), end);
        }
        const items = [];
        while (items.length < Number(line)) {
            const item = this.#parse();
            if (item === undefined) return undefined;
            items.push(item);
        }
        return items;
    }
}
